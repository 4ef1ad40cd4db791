"""Exports for transformers: the very logits of the swarm's stages, generation with a cache, nothing but our class."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import iota.hf
from export_case import bpe_tokenizer, changed, create, merge, merged_run, run_config
from iota.cli.main import build_parser
from iota.errors import IotaError
from iota.model.boundary import CODECS
from iota.model.layout import Layout, initial_state
from iota.nodes.export import open_model
from iota.nodes.export_hf import export_hf

torch.set_num_threads(1)
IDS = torch.tensor(np.random.default_rng(1).integers(0, 256, (2, 12)))
EVERY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


async def exported(folder: Path, codec: str, wire: str = "float32", **model: object):  # type: ignore[no-untyped-def]
    """The swarm's chain, and the same model as transformers loads it."""
    await merged_run(folder / "run", codec, wire, **model)
    export_hf(folder / "run", folder / "out")
    return open_model(folder / "run").chain, AutoModelForCausalLM.from_pretrained(folder / "out").eval()


def logits(model, ids: torch.Tensor = IDS, **rest: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return model(ids, **rest).logits


@pytest.mark.parametrize("codec", CODECS)
async def test_logits_and_generated_tokens_are_those_of_the_stages_in_a_row(tmp_path: Path, codec: str) -> None:
    chain, model = await exported(tmp_path, codec, "float32" if codec == "identity" else "bfloat16")
    plain = codec == "identity"
    assert type(model) is (LlamaForCausalLM if plain else iota.hf.IotaForCausalLM)
    want = chain.logits(IDS.numpy())
    assert want.std() > 0.3
    np.testing.assert_allclose(logits(model).numpy(), want, rtol=0, atol=1e-5)

    mask = torch.ones_like(IDS)
    cached = model.generate(IDS, attention_mask=mask, **EVERY)
    assert torch.equal(cached, model.generate(IDS, attention_mask=mask, use_cache=False, **EVERY))
    row = IDS[0].tolist()
    for _ in range(9):
        row.append(int(chain.logits(np.array([row]))[0, -1].argmax()))
    assert cached[0].tolist() == row


@pytest.mark.parametrize("codec", ["identity", "resbm4+ids"])
async def test_generation_in_every_way_that_transformers_has(tmp_path: Path, codec: str) -> None:
    _, model = await exported(tmp_path, codec)
    mask = torch.ones_like(IDS)
    plain = model.generate(IDS, attention_mask=mask, **EVERY)
    fixed = model.generate(IDS, attention_mask=mask, cache_implementation="static", disable_compile=True, **EVERY)
    assert torch.equal(plain, fixed)
    beams = {"num_beams": 3, "attention_mask": mask, **EVERY}
    assert torch.equal(model.generate(IDS, **beams), model.generate(IDS, use_cache=False, **beams))
    # The first row is padded on the left: it goes on as it does alone.
    padded, mask = IDS.clone(), mask.clone()
    padded[0, :5] = mask[0, :5] = 0
    together = model.generate(padded, attention_mask=mask, **EVERY)
    alone = model.generate(IDS[:1, 5:], attention_mask=mask[:1, 5:], **EVERY)
    assert together[0, 12:].tolist() == alone[0, 7:].tolist() and together[1].tolist() == plain[1].tolist()


async def test_a_cached_token_costs_one_position_and_gives_the_same_logits(tmp_path: Path) -> None:
    _, model = await exported(tmp_path, "resbm+ids")
    lengths: list[int] = []
    model.stages[0].embedding.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    model.generate(IDS, attention_mask=torch.ones_like(IDS), **EVERY)
    assert lengths == [12] + [1] * 8
    with torch.no_grad():
        first = model(IDS[:, :5])
        cache = first["cache" if "cache" in first else "past_key_values"]  # as the version calls it; both are taken
        rest = model(IDS[:, 5:], past_key_values=cache, labels=IDS[:, 5:], logits_to_keep=2)
        whole = model(IDS, use_cache=False, labels=IDS)
    assert (rest.logits - whole.logits[:, -2:]).abs().max() < 1e-5 and rest.logits.shape[1] == 2
    want = torch.nn.functional.cross_entropy(whole.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert abs(whole.loss - want) < 1e-5 and not {"cache", "past_key_values"} & whole.keys()


async def test_a_plain_llama_differs_only_by_what_the_wire_rounded(tmp_path: Path) -> None:
    chain, model = await exported(tmp_path, "identity", "bfloat16")
    off = np.abs(logits(model).numpy() - chain.logits(IDS.numpy()))
    assert 1e-6 < off.max() < 0.1


@pytest.mark.parametrize(("stages", "model"), [(1, {"tie_embeddings": True}), (3, {"rope_scaling": True, "ffn": 96})])
async def test_tied_embeddings_and_scaled_rotary_positions(tmp_path: Path, stages: int, model: dict[str, bool]) -> None:
    config = changed(run_config(tmp_path / "text", "resbm" if stages == 1 else "identity", "float32"), "model", **model)
    manifest = await create(tmp_path / "run", changed(config, "stages", count=stages))
    await merge(tmp_path / "run", manifest)
    export_hf(tmp_path / "run", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    want = open_model(tmp_path / "run").chain.logits(IDS.numpy())
    assert isinstance(theirs, LlamaForCausalLM) and theirs.config.tie_word_embeddings is (stages == 1)
    np.testing.assert_allclose(logits(theirs).numpy(), want, rtol=0, atol=1e-5)


async def test_one_stage_in_a_subspace_is_no_plain_llama(tmp_path: Path) -> None:
    config = changed(run_config(tmp_path / "text", "subspace", "float32"), "stages", count=1)
    manifest = await create(tmp_path / "run", config)
    await merge(tmp_path / "run", manifest)
    assert export_hf(tmp_path / "run", tmp_path / "out")[1] == "iota"
    want = open_model(tmp_path / "run").chain.logits(IDS.numpy())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(logits(model).numpy(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", ["identity", "bottleneck"])
async def test_the_tokenizer_goes_along(tmp_path: Path, codec: str) -> None:
    bpe_tokenizer(tmp_path / "bpe.json")
    config = changed(run_config(tmp_path / "text", codec), "data", tokenizer=str(tmp_path / "bpe.json"))
    manifest = await create(tmp_path / "run", changed(config, "model", vocabulary=300))
    card, kind = export_hf(tmp_path / "run", tmp_path / "out")
    assert (card.run, card.epoch, kind) == (manifest.run, 0, "llama" if codec == "identity" else "iota")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "bpe.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    loaded = open_model(tmp_path / "run")
    ids = loaded.tokenizer.encode("the quick foxes merge").tolist()
    assert tokenizer.encode("the quick foxes merge", add_special_tokens=False) == ids[:-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == ids[-1] == model.generation_config.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "the quick foxes merge"


async def test_saved_again_it_is_the_same_and_from_nothing_it_is_a_new_runs(tmp_path: Path) -> None:
    _, model = await exported(tmp_path, "subspace", "bfloat16")
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))

    new = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    card = new.config.card()
    for stage, cut in enumerate(card.cuts):
        layout = Layout.of(new.stages[stage])
        for name, view in layout.views(initial_state(card.config(), stage, cut, card.seed)).items():
            np.testing.assert_array_equal(new.stages[stage].get_parameter(name).detach().numpy(), view)
    assert card.seed == 11 and torch.equal(
        new.stages[1].boundaries["0"].fixed.table, new.stages[0].embedding.fixed.table
    )


async def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    _, model = await exported(tmp_path, "bottleneck")
    limit = model.config.max_position_embeddings
    with pytest.raises(IotaError, match=f"position {limit} lies beyond the model's sequence of {limit}"):
        logits(model, torch.zeros(1, limit + 1, dtype=torch.int64))
    with pytest.raises(IotaError, match="no input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 32))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with pytest.raises(IotaError, match=r"bfloat16.*float32"):
        logits(half)

    path = tmp_path / "out" / "config.json"
    facts = msgspec.json.decode(path.read_bytes())
    for change, text in (({"format": "iota export 9"}, "iota export 9"), ({"cuts": [[0, 3]]}, "cuts")):
        path.write_bytes(msgspec.json.encode(facts | {"iota": facts["iota"] | change}))
        with pytest.raises(IotaError, match=text):
            AutoConfig.from_pretrained(tmp_path / "out")


async def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for codec, text in (("identity", "rounded to bfloat16"), ("resbm", "import iota.hf")):
        await merged_run(tmp_path / codec, codec)
        words = ["export", str(tmp_path / codec), str(tmp_path / f"{codec}-out"), "--format", "hf"]
        arguments = build_parser().parse_args(words)
        assert arguments.run(arguments) == 0
        assert text in capsys.readouterr().out
        with pytest.raises(IotaError, match="not an empty folder"):
            arguments.run(arguments)
