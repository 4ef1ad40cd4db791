"""A run's merged weights leave its folder whole: the exported model gives the trained stages' very logits."""

import argparse
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from export_case import make_run, merge
from iota.cli import export as export_command
from iota.cli import generate as generate_command
from iota.config.schema import Manifest
from iota.errors import IotaError
from iota.model.layout import Layout
from iota.model.trainer import StageTrainer
from iota.nodes import checkpoint as run_folder
from iota.nodes.export import export, open_model, prompt_ids
from iota.store.tokens import ByteTokenizer

CASES = [("identity", "float32"), ("bottleneck", "bfloat16"), ("resbm4", "bfloat16"), ("subspace", "bfloat16")]


def trained_logits(manifest: Manifest, states: list[np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The stages as miners hold them, one after another."""
    torch.set_num_threads(1)
    x = None
    for stage, cut in enumerate(manifest.cuts):
        trainer = StageTrainer(manifest.config, stage, cut, "cpu", "float32")
        trainer.load(states[stage], None, None, 0, 0, 0)
        x = trainer.evaluate(x, ids if trainer.reads_ids else None)
    assert x is not None
    return np.frombuffer(x.data, dtype="<f4").reshape(x.shape)


@pytest.mark.parametrize(("codec", "wire"), CASES)
async def test_exported_logits_are_the_trained_stages_own(tmp_path: Path, codec: str, wire: str) -> None:
    manifest = await make_run(tmp_path / "run", codec, wire)
    states = await merge(tmp_path / "run", manifest)
    card = export(tmp_path / "run", tmp_path / "out")
    assert (card.run, card.epoch, card.tokens, card.tokenizer) == (manifest.run, 3, None, "bytes")
    model = open_model(tmp_path / "out")
    ids = np.random.default_rng(5).integers(0, 256, (2, 20))
    want = trained_logits(manifest, states, ids)
    np.testing.assert_array_equal(model.chain.logits(ids), want)
    np.testing.assert_array_equal(open_model(tmp_path / "run").chain.logits(ids), want)
    assert want.std() > 0.01 and (model.run, model.epoch) == (manifest.run, 3)

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layout = Layout.for_stage(manifest.config, 1, manifest.cuts[1])
    for name, view in layout.views(states[1]).items():
        np.testing.assert_array_equal(tensors[name], view)
    assert sum(values.size for values in tensors.values()) == sum(manifest.parameters)
    assert card.transformers_names["head.weight"] == "lm_head.weight"
    assert all("boundaries" not in name for name in card.transformers_names)


async def test_before_the_first_merge_it_is_the_untrained_model(tmp_path: Path) -> None:
    manifest = await make_run(tmp_path / "run")
    card = export(tmp_path / "run", tmp_path / "out")
    assert (card.epoch, card.tokens) == (0, 0)
    loss = -np.log(np.exp(open_model(tmp_path / "out").chain.logits(np.zeros((1, 4), int))).mean())
    assert abs(loss) < 0.2 and manifest.config.stages.codec == "bottleneck"


async def test_tokens_come_from_the_history(tmp_path: Path) -> None:
    manifest = await make_run(tmp_path / "run")
    await merge(tmp_path / "run", manifest)
    rows = [{"epoch": 3, "tokens_at_start": 10}, {"epoch": 4, "tokens_at_start": 50}]
    (tmp_path / "run" / "history.json").write_bytes(msgspec.json.encode({"tokens": 77, "epochs": rows}))
    assert export(tmp_path / "run", tmp_path / "a").tokens == 50
    (tmp_path / "run" / "history.json").write_bytes(msgspec.json.encode({"tokens": 77, "epochs": rows[:1]}))
    assert export(tmp_path / "run", tmp_path / "b").tokens == 77


async def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    manifest = await make_run(folder)
    await merge(folder, manifest)
    with pytest.raises(IotaError, match=rf"run {manifest.run}, this is run other-1") as refused:
        run_folder.read_checkpoints(folder, "other-1")
    assert refused.value.code == "other_run"

    shard = folder / "blobs" / "merge" / "3" / "1" / "0" / "abc.bin"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IotaError, match="stage 1, weights") as refused:
        export(folder, tmp_path / "out")
    assert refused.value.code == "corrupt" and not (tmp_path / "out").exists()
    shard.unlink()
    with pytest.raises(IotaError, match=r"merge/3/1/0/abc\.bin is gone") as refused:
        export(folder, tmp_path / "out")
    assert refused.value.code == "no_object"

    rows = msgspec.json.decode((folder / "checkpoint.json").read_bytes())
    gap = [dict(row, pieces=row["pieces"][1:]) for row in rows]
    for wrong, code in ((b"[{", "corrupt"), (msgspec.json.encode(rows[1:]), "corrupt"), (msgspec.json.encode(gap), "")):
        (folder / "checkpoint.json").write_bytes(wrong)
        with pytest.raises(IotaError) as refused:
            export(folder, tmp_path / "out")
        assert refused.value.code == (code or "corrupt")


async def test_nothing_is_overwritten(tmp_path: Path) -> None:
    await make_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(IotaError) as refused:
        export(tmp_path / "run", tmp_path / "out")
    assert refused.value.code == "not_empty" and (tmp_path / "out" / "mine.txt").read_text() == "keep"
    (tmp_path / "out" / "mine.txt").unlink()
    export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


async def test_what_is_no_exported_model_is_refused_by_name(tmp_path: Path) -> None:
    await make_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    weights, card = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    good, tensors, facts = weights.read_bytes(), load_file(weights), msgspec.json.decode(card.read_bytes())

    def refusal() -> str:
        with pytest.raises(IotaError) as refused:
            open_model(tmp_path / "out")
        return f"{refused.value.code}: {refused.value.cause}"

    save_file({name: values for name, values in tensors.items() if name != "norm.weight"}, weights)
    assert refusal().startswith("bad_checkpoint: tensor norm.weight of shape")
    save_file({**tensors, "norm.weight": np.zeros(3, np.float32)}, weights)
    assert "norm.weight is float32 (3,), the model needs float32" in refusal()
    save_file({**tensors, "extra.weight": np.zeros(3, np.float32)}, weights)
    assert "extra.weight" in refusal()
    weights.write_bytes(good[:-10])
    assert "no whole safetensors file" in refusal()
    weights.unlink()
    assert refusal().startswith("no_object")
    weights.write_bytes(good)
    blocks, many = facts["model"]["blocks"], 10**9
    last = facts["cuts"][-1][0]
    for change in (
        {"format": "x"},
        {"cuts": [[0, 1], [1, 2]]},
        {"cuts": [[0, 0], [0, 1], [1, blocks]]},
        {"cuts": [[0, 2], [2, 1], [1, blocks]]},
        {"stages": {"count": "three"}},
        {"more": 1},
        {"model": facts["model"] | {"blocks": many}, "cuts": [*facts["cuts"][:-1], [last, many]]},
        {"model": facts["model"] | {"vocabulary": 2**60}},
    ):
        card.write_bytes(msgspec.json.encode({**facts, **change}))
        assert refusal().startswith("bad_checkpoint")
    for wrong in ({"ffn": -5}, {"rope_theta": 0.0}, {"norm_eps": -1.0}):
        card.write_bytes(msgspec.json.encode({**facts, "model": facts["model"] | wrong}))
        assert refusal().startswith("bad_config")
    card.write_text('{"format":' * 20_000)
    assert refusal().startswith("bad_checkpoint")
    card.unlink()
    assert refusal().startswith("no_checkpoint")


def test_a_prompt_is_text_without_the_end_of_a_document() -> None:
    tokenizer = ByteTokenizer()
    assert bytes(prompt_ids(tokenizer, "Hé\n\n")) == "Hé\n\n".encode()
    assert bytes(prompt_ids(tokenizer, "\n")) == b"\n"
    for nothing in ("", "\0"):
        with pytest.raises(IotaError, match="the prompt is empty"):
            prompt_ids(tokenizer, nothing)


def parse(module: object, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add(parser.add_subparsers())
    return parser.parse_args(list(words))


async def test_export_then_generate_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = await make_run(tmp_path / "run")
    await merge(tmp_path / "run", manifest)
    args = parse(export_command, "export", str(tmp_path / "run"), str(tmp_path / "out"), "--json")
    assert args.run(args) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["run"] == manifest.run

    texts = []
    for folder in ("out", "run"):
        args = parse(generate_command, "generate", str(tmp_path / folder), "x" * 50, "--tokens", "9", "--json")
        assert args.run(args) == 0
        out, err = capsys.readouterr()
        facts = msgspec.json.decode(out)
        assert facts["epoch"] == 3 and facts["tokens"] == 9 and "sees the last 32" in facts["notices"][0]
        assert "50 tokens" in err
        texts.append(facts["text"])
    assert texts[0] == texts[1] != ""
    args = parse(generate_command, "generate", str(tmp_path / "out"), "Hello", "--tokens", "5")
    assert args.run(args) == 0 and capsys.readouterr().out.startswith("Hello")
    for words, code in ((("none", "x"), "no_checkpoint"), ((str(tmp_path), "x"), "no_checkpoint")):
        args = parse(generate_command, "generate", *words)
        with pytest.raises(IotaError) as refused:
            args.run(args)
        assert refused.value.code == code
    args = parse(export_command, "export", str(tmp_path / "none"), str(tmp_path / "new"))
    with pytest.raises(IotaError) as refused:
        args.run(args)
    assert refused.value.code == "no_run" and not (tmp_path / "new").exists()
