"""The end report: from synthetic histories, whole, empty and half way; it never prints NaN and never falls over."""

import hashlib
import importlib
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iota.cli import report as command
from iota.errors import IotaError
from iota.lab import report, report_facts, report_text
from test_export import make_run, merge

LOSSES = (3.2, 2.6, 2.2, 1.9, 1.7, 1.6)
POOL = 1_000_000


def key(number: int) -> str:
    return hashlib.sha256(f"key {number}".encode()).hexdigest()


def member(number: int, stage: int, role: str = "miner", **more: Any) -> dict[str, Any]:
    row = {"number": number, "stage": stage, "key": key(number), "role": role, "alive": True, "busy_seconds": 100.0}
    return {**row, "passes_total": 50, **more}


def epoch(number: int, miners: list[dict[str, Any]], loss: float | None, opened: float) -> dict[str, Any]:
    """40 s of TRAIN, 1 s of drain, 1 s each of commit, upload, 2 s of reduce, 1 s of sync."""
    begins = dict(zip(("train", "drain", "commit", "upload", "reduce", "sync"), (0, 40, 41, 42, 43, 45), strict=True))
    whys = dict.fromkeys(begins, "all that was waited for had come") | {"drain": "quorum: every stage has enough"}
    matrix = {}
    for stage in sorted({m["stage"] for m in miners}):
        keys = [m["key"] for m in miners if m["stage"] == stage]
        off = [[int(i != j) for j in range(len(keys))] for i in range(len(keys))]
        zero = [[0] * len(keys) for _ in keys]
        matrix[str(stage)] = {"members": keys, "agree": off, "disagree": zero, "settled": {"0": "agreed"}}
    return {
        "epoch": number,
        "opened": opened,
        "closed": opened + 46,
        "began": {name: opened + at for name, at in begins.items()},
        "until": {name: opened + at + 60 for name, at in begins.items()},
        "why": whys,
        "tokens_at_start": (number - 1) * 100_000,
        "samples": {"full": 97, "partial": 2, "returned": 1},
        "train_loss": None if loss is None else loss + 0.05,
        "heldout_loss": loss,
        "passes": {m["key"]: 49 for m in miners},
        "steps": {m["key"]: 49 for m in miners},
        "effective_batch": {stage: 98 for stage in matrix},
        "merged": dict.fromkeys(matrix, True),
        "agreement": matrix,
    }


def audit(number: int, e: int, m: dict[str, Any], verdict: str = "valid", **more: Any) -> dict[str, Any]:
    row = {"audit": number, "epoch": e, "miner": m["key"], "stage": m["stage"], "steps": [8, 16], "state": "closed"}
    row |= {"verdict": verdict, "why": "replay equal" if verdict == "valid" else "the change is another one"}
    return {**row, "worst": [["change", 3, 0.999998, 1.0]], "validator": key(99), "seconds": 4.5, **more}


def build(epochs: int = 5, stages: int = 3, each: int = 2) -> dict[str, Any]:
    """A run's history as the orchestrator writes it; the last miner is a cheat whose audits are all invalid."""
    miners = [member(i, i // each) for i in range(stages * each)]
    rows = [epoch(e, miners, LOSSES[e], 1010.0 + 46 * (e - 1)) for e in range(1, epochs + 1)]
    audits = [
        audit(e * 100 + i, e, m, "invalid" if i == len(miners) - 1 else "valid")
        for e in range(1, epochs + 1)
        for i, m in enumerate(miners)
    ]
    end = 1010.0 + 46 * epochs
    if rows:
        rows[-1]["began"]["finishing"] = end
    paid = POOL // max(1, len(miners) - 1)
    return {
        "run": "synthetic-01234567",
        "started": 1000.0,
        "now": end + 30,
        "phase": "finished",
        "why": "stop rule: epochs >= 5",
        "boots": 0,
        "vocabulary": 256,
        "parameters": [700_000] * stages,
        "tokens": epochs * 100_000,
        "bytes_per_token": 1.0,
        "trigram_loss": 2.05,
        "untrained_loss": 5.56,
        "wire_bytes": 50_000_000,
        "uncompressed_bytes": 300_000_000,
        "members": [*miners, member(99, -1, "validator")],
        "epochs": rows,
        "audits": audits,
        "ledger_head": "ab" * 32,
        "burned": [POOL - paid * (len(miners) - 1)] * epochs,
        "emissions": [{m["key"]: paid for m in miners[:-1]} for _ in range(epochs)],
    }


EMPTY = {
    "run": "",
    "started": 0.0,
    "now": 5.0,
    "phase": "gather",
    "why": "",
    "boots": 0,
    "vocabulary": 256,
    "parameters": [],
    "tokens": 0,
    "bytes_per_token": 1.0,
    "trigram_loss": None,
    "untrained_loss": None,
    "wire_bytes": 0,
    "uncompressed_bytes": 0,
    "members": [],
    "epochs": [],
    "audits": [],
    "ledger_head": None,
    "burned": [],
    "emissions": [],
}


def write(folder: Path, history: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "history.json").write_bytes(msgspec.json.encode(history))
    return report.write_report(folder)


def sound(facts: dict[str, Any], folder: Path) -> str:
    """What holds of every report."""
    text = (folder / "report.txt").read_text()
    assert text == facts["text"] and text.count("\n") <= 110 and max(map(len, text.splitlines())) <= 100
    words = text.replace("%", " ").replace(",", " ").split()
    assert not {"nan", "NaN", "inf", "None"} & set(words), text
    stored = msgspec.json.decode((folder / "report.json").read_bytes())
    assert stored == msgspec.json.decode(msgspec.json.encode({k: v for k, v in facts.items() if k != "text"}))
    for name in facts["pictures"]:
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list(folder.glob("*.part"))
    return text


def test_the_numbers_are_those_of_the_history(tmp_path: Path) -> None:
    facts = write(tmp_path, build())
    text = sound(facts, tmp_path)
    assert facts["heldout_loss"] == [5.56, 2.6, 2.2, 1.9, 1.7, 1.6] == facts["heldout_loss_per_byte"]
    assert facts["untrained_ratio"] == pytest.approx(5.56 / math.log(256)) and facts["beats_trigram"] is True
    assert facts["tokens_per_s"] == pytest.approx(500_000 / (5 * 41))
    assert facts["tokens_per_s_run"] == pytest.approx(500_000 / (10 + 5 * 46))
    assert facts["wire_bytes"] == 50_000_000 and facts["compression"] == 6.0
    shares = facts["waiting"]["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["computing"] == pytest.approx(600 / (6 * 240)) and shares["gather"] == pytest.approx(10 / 240)
    assert shares["reduce"] == pytest.approx(10 / 240)
    assert facts["beff"] == [{"0": 98, "1": 98, "2": 98}] * 5
    assert facts["peak_disk_bytes"] >= 4096 and facts["generated"] is None and "manifest" in facts["generated_why"]
    cheat, honest = key(5), key(0)
    assert facts["verdicts"][cheat]["invalid"] == 5 and facts["verdicts"][honest]["valid"] == 5
    assert facts["emissions"][honest]["total"] == 5 * 200_000 and not facts["emissions"][honest]["zeros"]
    (zero,) = facts["emissions"][cheat]["zeros"]
    assert (zero["first"], zero["last"]) == (1, 5) and "invalid: the change is another one" in zero["why"]
    assert facts["timeline"]["epoch"] == 5 and [span["phase"] for span in facts["timeline"]["phases"]] == list(
        report_facts.PHASES[:-1]
    )
    assert facts["timeline"]["phases"][4] | {"why": ""} == {
        "phase": "reduce",
        "begin": 43,
        "end": 45,
        "until": 103,
        "why": "",
    }
    for told in ("beaten", "6.0 times less", "EPOCH 5 AS IT HAPPENED", key(5)[:8], "quorum: every stage has enough"):
        assert told in text
    assert len(facts["pictures"]) == 4


def test_before_anything_happened(tmp_path: Path) -> None:
    facts = write(tmp_path, EMPTY)
    text = sound(facts, tmp_path)
    assert facts["heldout_loss"] == [None] and facts["tokens_per_s"] is None and facts["pictures"] == []
    assert "none began" in text and "No miner yet" in text and "no miner has trained" in text


@pytest.mark.parametrize("epochs", [0, 1, 5])
@pytest.mark.parametrize("each", [0, 1])
def test_few_miners_and_few_epochs(tmp_path: Path, epochs: int, each: int) -> None:
    sound(write(tmp_path, build(epochs, 2, each) if each else build(epochs, 0, 1)), tmp_path)


def test_an_epoch_half_way_with_nothing_measured(tmp_path: Path) -> None:
    history = build(2)
    last = history["epochs"][-1]
    last.update(heldout_loss=None, train_loss=None, closed=None, agreement={}, effective_batch={}, passes={}, steps={})
    last["began"] = {"train": last["opened"]}
    last["until"] = {"train": None}
    history.update(
        phase="train",
        now=last["opened"] + 12,
        untrained_loss=None,
        emissions=[{}],
        burned=[POOL],
        audits=[audit(1, 1, history["members"][0], "", state="show", seconds=0.0, worst=[], why="")],
    )
    facts = write(tmp_path, history)
    sound(facts, tmp_path)
    assert facts["heldout_loss"] == [None, 2.6, None] and facts["final_loss"] == 2.6
    assert facts["train_seconds"] == 41 + 12 and facts["agreement"]["epoch"] == 1 and facts["timeline"]["epoch"] == 1
    reasons = {row["zeros"][0]["why"] for row in facts["emissions"].values()}
    assert any("still open" in why for why in reasons) and any("none of its passes was drawn" in why for why in reasons)


def test_numbers_that_are_not_finite_become_dashes(tmp_path: Path) -> None:
    history = build(2)
    history["epochs"][1]["heldout_loss"] = math.nan
    history["audits"][0]["worst"] = [["change", 1, math.nan, math.inf]]
    facts = report_facts.collect(history)
    assert facts["heldout_loss"][2] is None and facts["verdicts"][key(0)]["worst_cosine"] == 0.999998
    sound(write(tmp_path, history), tmp_path)


def test_a_large_and_long_run_stays_readable(tmp_path: Path) -> None:
    history = build(5, 4, 20)
    history["epochs"] = [{**history["epochs"][i % 5], "epoch": i + 1} for i in range(60)]
    text = sound(write(tmp_path, history), tmp_path)
    assert "  ..." in text


def test_a_tokenizer_of_its_own_is_told_per_byte_too(tmp_path: Path) -> None:
    history = build(1) | {"bytes_per_token": 4.0, "trigram_loss": None}
    facts = write(tmp_path, history)
    text = sound(facts, tmp_path)
    assert facts["heldout_loss_per_byte"] == [1.39, 0.65] and facts["beats_trigram"] is None
    assert "nats per token" in text and "per byte" in text and "0.650" in text


def test_a_liar_shows_in_the_matrix(tmp_path: Path) -> None:
    history = build(1, 1, 3)
    matrix = history["epochs"][0]["agreement"]["0"]
    matrix["disagree"] = [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    matrix["agree"] = [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    matrix["settled"] = {"0": "agreed", "1": "decided", "2": "decided"}
    text = sound(write(tmp_path, history), tmp_path)
    assert "1 agreed, 2 decided" in text and f"NOT equal: {key(0)[:8]}" in text and "0/1" in text


def test_zero_pay_has_a_reason_in_every_case() -> None:
    def why(passes: dict[int, dict[str, int]], audits: list[dict[str, Any]], e: int = 2) -> str:
        return report_facts.zero_reason({"audits": audits}, key(0), e, passes)

    m, worked = member(0, 0), {1: {key(0): 3}, 2: {key(0): 3}}
    assert "no backward pass" in why({1: {}}, [])
    assert "none of its passes was drawn" in why(worked, [])
    assert "were invalid" in why(worked, [audit(1, 1, m, "invalid")])
    assert "gave no verdict" in why(worked, [audit(1, 1, m, "inconclusive")])
    assert "no longer count" in why({1: {key(0): 3}, 2: {}}, [audit(1, 1, m)])
    assert "rounds to zero" in why(worked, [audit(1, 1, m)])


def test_disk_is_the_largest_sample(tmp_path: Path) -> None:
    (tmp_path / "disk.json").write_bytes(msgspec.json.encode({"samples": [[1.0, 5], [2.0, 7_000_000_000], [3.0, 6]]}))
    assert write(tmp_path, EMPTY)["peak_disk_bytes"] == 7_000_000_000
    (tmp_path / "disk.json").write_bytes(b"{")
    facts = write(tmp_path, EMPTY)
    assert facts["peak_disk_bytes"] < 1_000_000 and any("disk.json cannot be read" in note for note in facts["notices"])


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", missing)
    facts = write(tmp_path, build(1))
    assert facts["pictures"] == [] and "iota-train[plots]" in sound(facts, tmp_path)


async def test_a_real_folder_gives_a_generated_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    manifest = await make_run(folder)
    await merge(folder, manifest)
    (folder / "history.json").write_bytes(msgspec.json.encode(build(3)))
    facts = command.write_report(folder)
    text = capsys.readouterr().out
    made = facts["generated"]
    assert made["epoch"] == 3 and made["prompt"] == "The " and len(made["text"]) > 100
    assert text == (folder / "report.txt").read_text() and "GENERATED TEXT (epoch 3" in text
    assert command.write_report(folder, as_json=True)["generated"] == made
    assert msgspec.json.decode(capsys.readouterr().out)["run"] == "synthetic-01234567"
    shutil.rmtree(folder / "blobs" / "merge")
    assert "is gone" in command.write_report(folder)["generated_why"]


def test_no_history_yet_is_said(tmp_path: Path) -> None:
    with pytest.raises(IotaError) as refused:
        report.write_report(tmp_path)
    assert refused.value.code == "no_history"
    (tmp_path / "history.json").write_text("{")
    with pytest.raises(IotaError) as refused:
        report.write_report(tmp_path)
    assert refused.value.code == "corrupt" and not list(tmp_path.glob("report*"))


def test_sizes_for_people() -> None:
    assert [report_text.size(n) for n in (None, 0, 999, 1500, 2e6, 3.21e9)] == [
        "-",
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.0 MB",
        "3.2 GB",
    ]
