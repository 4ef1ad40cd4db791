"""A run that begins with a saved model has exactly its logits at epoch 0; what does not fit is refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from export_case import bpe_tokenizer, changed, create, merge, run_config
from iota.cli.main import build_parser
from iota.config.load import load_run
from iota.config.schema import ModelConfig, RunConfig
from iota.errors import IotaError
from iota.model.layout import Layout, initial_state
from iota.model.partition import cut_blocks
from iota.nodes.export import export, open_model
from iota.nodes.export_hf import export_hf
from iota.nodes.huggingface import llama3_scaling, llama_config, llama_model
from iota.nodes.start import Start, import_run

torch.set_num_threads(1)
IDS = np.random.default_rng(1).integers(0, 300, (2, 20))
SETTINGS = ["data.heldout_share=0.2", "data.heldout_tokens=512", "model.sequence=32"]


def save_llama(folder: Path, *, dtype: torch.dtype = torch.float32, shards: str = "5GB", **other: Any) -> torch.Tensor:
    """A small Llama with a tokenizer, as transformers saves it; its logits of IDS."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = dict(vocab_size=300, hidden_size=32, intermediate_size=96, num_hidden_layers=3)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | {"rope_theta": 5e4, "rms_norm_eps": 1e-6} | other))).to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    bpe_tokenizer(folder / "tokenizer.json")
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return whole(torch.tensor(IDS)).logits


def texts(tmp_path: Path) -> list[str]:
    """Settings for a run over a little text."""
    run_config(tmp_path / "text")
    return [f"data.source={tmp_path / 'text'}", *SETTINGS]


async def started(tmp_path: Path, *settings: str, folder: str = "llama"):  # type: ignore[no-untyped-def]
    """The model at epoch 0 of a run made by `iota import`."""
    import_run(tmp_path / folder, tmp_path / "run.toml", [*texts(tmp_path), *settings])
    manifest = await create(tmp_path / "run", load_run(tmp_path / "run.toml"))
    return manifest, open_model(tmp_path / "run")


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_epoch_0_has_the_models_own_logits(tmp_path: Path, stages: int, dtype: torch.dtype) -> None:
    want = save_llama(tmp_path / "llama", dtype=dtype)
    manifest, model = await started(tmp_path, f"stages.count={stages}", "stages.wire_dtype=float32")
    assert want.std() > 0.3 and len(manifest.cuts) == stages and model.epoch == 0
    np.testing.assert_allclose(model.chain.logits(IDS), want, rtol=0, atol=1e-5)
    assert model.tokenizer.file == (tmp_path / "llama" / "tokenizer.json").read_bytes()
    assert (manifest.config.model.rope_theta, manifest.config.model.norm_eps) == (5e4, 1e-6)


async def test_sharded_and_tied_it_is_untied_for_several_stages(tmp_path: Path) -> None:
    want = save_llama(tmp_path / "llama", shards="20KB", tie_word_embeddings=True)
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    manifest, model = await started(tmp_path, "stages.wire_dtype=float32")
    assert not manifest.config.model.tie_embeddings and len(manifest.cuts) == 3
    np.testing.assert_allclose(model.chain.logits(IDS), want, rtol=0, atol=1e-5)
    assert "tied embedding is copied" in Start(tmp_path / "llama").notes(manifest.config)[0]
    config, notes = import_run(tmp_path / "llama", tmp_path / "one.toml", ["stages.count=1", *texts(tmp_path)])
    assert config.model.tie_embeddings and notes == []


async def test_a_codecs_tensors_are_drawn_and_the_rest_is_the_models(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    manifest, _ = await started(tmp_path, "stages.codec=resbm+ids", "stages.channels=4")
    config, cut = manifest.config, manifest.cuts[1]
    layout, start = Layout.for_stage(config, 1, cut), Start(tmp_path / "llama")
    ours, drawn = (layout.views(flat) for flat in (start.weights(config, 1, cut), initial_state(config, 1, cut, 0)))
    theirs = load_file(tmp_path / "llama" / "model.safetensors")
    same = [name for name in ours if np.array_equal(ours[name], drawn[name])]
    assert {name for name in ours if name.startswith("boundaries.")} <= set(same)
    np.testing.assert_array_equal(ours["blocks.1.ffn.up.weight"], theirs["model.layers.1.mlp.up_proj.weight"])
    assert "'resbm+ids' are drawn" in start.notes(config)[0]


@pytest.mark.parametrize("form", ["iota", "hf"])
@pytest.mark.parametrize("codec", ["identity", "resbm+ids", "subspace"])
async def test_an_exported_model_goes_on_where_it_was(tmp_path: Path, codec: str, form: str) -> None:
    manifest = await create(tmp_path / "first", run_config(tmp_path / "text", codec, "float32"))
    await merge(tmp_path / "first", manifest)
    (export if form == "iota" else export_hf)(tmp_path / "first", tmp_path / "out")
    same = ["stages.wire_dtype=float32"]
    again, model = await started(tmp_path, *same, folder="out")
    assert again.config.data.tokenizer == "bytes" and again.parameters == manifest.parameters
    want = open_model(tmp_path / "first").chain.logits(IDS % 256)
    np.testing.assert_array_equal(model.chain.logits(IDS % 256), want)
    if codec == "resbm+ids":  # under another seed the codec would be another one
        start = Start(tmp_path / "out")
        assert start.notes(changed(again.config, seed=12)) and not start.notes(again.config)
        other = changed(again.config, "stages", count=2)  # nor do its halves belong between other blocks
        drawn = start.weights(other, 0, cut_blocks(other)[0])
        layout = Layout.for_stage(other, 0, cut_blocks(other)[0])
        fresh = layout.views(initial_state(other, 0, cut_blocks(other)[0], other.seed))
        mine, name = layout.views(drawn), "boundaries.0.encoder_in.weight"
        assert start.notes(other) and np.array_equal(mine[name], fresh[name])
        assert not np.array_equal(mine["embedding.weight"], fresh["embedding.weight"])


async def test_the_run_itself_refuses_a_model_of_other_sizes_before_it_writes(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    config, _ = import_run(tmp_path / "llama", tmp_path / "run.toml", texts(tmp_path))

    async def refusal(config: RunConfig) -> str:
        with pytest.raises(IotaError) as refused:
            await create(tmp_path / "run", config)
        assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        return str(refused.value)

    text = await refusal(changed(config, "model", vocabulary=512, ffn=64))
    assert "model.vocabulary is 512, the folder's model has 300, model.ffn is 64, the folder's model has 96" in text
    assert "iota import" in text
    assert "tie_embeddings is True" in await refusal(
        changed(changed(config, "stages", count=1), "model", tie_embeddings=True)
    )
    assert "holds no model" in await refusal(changed(config, initial=str(tmp_path / "none")))
    assert "(embedding.weight) has shape (300, 32), the run needs (300, 8)" in await refusal(
        changed(config, "stages", codec="subspace", channels=8)
    )


def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    folder, weights, card = tmp_path / "llama", tmp_path / "llama" / "model.safetensors", tmp_path / "llama/config.json"
    good, tensors, facts = weights.read_bytes(), load_file(weights), msgspec.json.decode(card.read_bytes())
    words, count = texts(tmp_path), 0

    def refusal(*settings: str) -> str:
        nonlocal count
        count += 1
        with pytest.raises(IotaError) as refused:
            import_run(folder, tmp_path / f"{count}.toml", [*words, *settings])
        assert not (tmp_path / f"{count}.toml").exists()
        return f"{refused.value.code}: {refused.value}"

    def with_tensors(**changes: torch.Tensor | None) -> None:
        new = tensors | {name.replace("__", "."): values for name, values in changes.items()}
        save_file({name: values for name, values in new.items() if values is not None}, weights)

    norm = tensors["model.norm.weight"]
    with_tensors(model__norm__weight=None)
    assert "has no tensor model.norm.weight (norm.weight)" in refusal()
    with_tensors(model__norm__weight=norm[:5].clone())
    assert "has shape (5,), the run needs (32,)" in refusal()
    with_tensors(model__norm__weight=norm.to(torch.int8))
    assert refusal().startswith("bad_checkpoint") and "holds I8" in refusal()
    with_tensors(model__norm__weight=torch.full_like(norm, float("nan")))
    assert refusal().startswith("not_finite")
    with_tensors(model__norm__weight=norm.double() * 1e300)
    assert refusal().startswith("not_finite")
    with_tensors(model__layers__0__self_attn__q_proj__bias=norm.clone())
    assert "has tensors that the run's model has not: model.layers.0.self_attn.q_proj.bias" in refusal()
    with_tensors(model__layers__0__self_attn__rotary_emb__inv_freq=norm.clone())
    import_run(folder, tmp_path / "good.toml", texts(tmp_path))
    weights.write_bytes(good[:-10])
    assert "no whole safetensors file" in refusal()
    weights.unlink()
    assert "has no weights" in refusal()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "pickled weights (pytorch_model.bin)" in refusal()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "names '../other.safetensors'" in refusal()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "does not say in which file" in refusal()
    (folder / "model.safetensors.index.json").unlink()
    weights.write_bytes(good)

    assert "model.vocabulary is 200, the folder's model has 300" in refusal("model.vocabulary=200")
    for change, text in (
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"head_dim": 8}, "2 heads of 8 channels"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "3 heads of 10 channels"),
        ({"head_dim": "16"}, "head_dim is '16', not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 blocks, beside it are 30 tensors"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type = 'linear'"),
        ({"rope_parameters": llama3_scaling() | {"factor": 32.0}}, "factor = 32.0"),
    ):
        card.write_bytes(msgspec.json.encode(facts | change))
        assert text in refusal()
    for broken in ("[", '{"a":' * 20_000):
        card.write_text(broken)
        assert "is no JSON object" in refusal()
    card.write_bytes(msgspec.json.encode(facts))
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal()
    import_run(folder, tmp_path / "bytes.toml", [*texts(tmp_path), "data.tokenizer=bytes"])


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(width=64, heads=4, kv_heads=2, ffn=160, sequence=99, rope_theta=1e4, norm_eps=1e-6),
        ModelConfig(rope_scaling=True, tie_embeddings=True, ffn=704),
    ],
)
def test_a_llamas_description_goes_both_ways(model: ModelConfig) -> None:
    described = llama_config(model)
    assert llama_model(described, "x") == model
    newer = {key: value for key, value in described.items() if key not in ("rope_theta", "rope_scaling")}
    rope = (described["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
    assert llama_model(newer | {"rope_parameters": rope}, "x") == model
    assert getattr(LlamaConfig(**described), "rope_parameters", rope) == rope  # as newer versions call it


def test_the_command_writes_a_run_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path / "My_Llama 1", tie_word_embeddings=True)
    run_file = tmp_path / "My_Run 1.toml"
    words = ["import", str(tmp_path / "My_Llama 1"), str(run_file)]
    for text in texts(tmp_path):
        words += ["--set", text]
    arguments = build_parser().parse_args(words)
    assert arguments.run(arguments) == 0
    said = capsys.readouterr().out
    assert "tied embedding is copied into the head" in said and "iota up" in said
    config = load_run(run_file)
    assert (config.name, config.initial) == ("my-run-1", str(tmp_path / "My_Llama 1")) and config.train.lr == 1e-4
    with pytest.raises(IotaError, match="exists"):
        arguments.run(arguments)
    arguments = build_parser().parse_args([*words[:2], str(tmp_path / "b.toml"), *words[3:], "--json"])
    assert arguments.run(arguments) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["config"]["model"]["vocabulary"] == 300
