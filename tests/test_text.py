"""Text sources, the held-out split and the trigram yardstick."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from iota.config.schema import DataConfig
from iota.errors import IotaError
from iota.store.ngram import Trigram
from iota.store.split import Split, shingles
from iota.store.text import LONG, Document, Reading, documents

WORDS = [
    "the",
    "run",
    "stage",
    "miner",
    "epoch",
    "loss",
    "of",
    "in",
    "weight",
    "shard",
    "which",
    "merge",
    "at",
    "token",
]


def read(source: Path | str, **more: object) -> tuple[list[Document], Reading]:
    reading = Reading()
    return list(documents(DataConfig(source=str(source), **more), reading)), reading


def refusal(source: Path | str, **more: object) -> IotaError:
    with pytest.raises(IotaError) as caught:
        read(source, **more)
    return caught.value


def prose(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + str(draw.randrange(30)) for _ in range(words))


# ------------------------------------------------------------------------------------------------------- sources


def test_what_python_carries_is_half_english_and_always_the_same() -> None:
    first, reading = read("python", max_bytes=600_000)
    second, _ = read("python", max_bytes=600_000)
    assert first == second
    assert reading.bytes == sum(len(d.text.encode()) for d in first) == 600_000
    size = Counter[str]()
    for document in first:
        size[document.kind] += len(document.text)
    assert size["docstrings"] > 100_000 and size["code"] > 100_000
    assert (size["docstrings"] + size["topic"]) / sum(size.values()) > 0.35
    assert not any("test" in d.name.split("/")[:-1] or "site-packages" in d.name for d in first)


def test_docstrings_are_taken_out_of_code() -> None:
    found = {d.name: d.text for d in read("python")[0]}
    both = [name for name in found if f"{name}:docstrings" in found]
    assert len(both) > 30
    for name in both[:20]:
        longest = max(found[f"{name}:docstrings"].split("\n\n"), key=len).strip()
        assert len(longest) < 60 or longest not in found[name]


def test_long_text_files_become_several_documents_and_lose_nothing(tmp_path: Path) -> None:
    text = "\n\n".join(prose(n, 40) for n in range(200)) + "é" * LONG * 2
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.TXT").write_text("short")
    (tmp_path / "ignored.md").write_text("no")
    found, reading = read(tmp_path)
    assert "".join(d.text for d in found if "a.txt" in d.name) == text
    assert found[-1].text == "short" and len(found) == reading.records and reading.skipped == 0
    assert all(len(d.text.encode()) <= LONG for d in found)
    assert [d.text for d in read(tmp_path / "sub" / "*.TXT")[0]] == ["short"]


def test_json_lines_plain_and_gzipped_with_a_column(tmp_path: Path) -> None:
    rows = [json.dumps({"body": f"text {n}", "id": n}) for n in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(rows))
    assert [d.text for d in read(tmp_path, column="body")[0]] == [f"text {n}" for n in range(5)] * 2
    error = refusal(tmp_path)
    assert error.code == "no_column" and "'text'" in error.cause and "body, id" in error.remedy


def test_bad_records_are_counted_and_above_a_tenth_refused(tmp_path: Path) -> None:
    good = [json.dumps({"text": f"text {n}"}) for n in range(18)]
    bad = ["{not json", json.dumps({"text": None}), json.dumps({"text": "  "}), "[1]", '{"text": "\\ud800"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(good + bad[:2]))
    found, reading = read(path)
    assert (len(found), reading.records, reading.skipped) == (18, 20, 2)
    assert "a.jsonl:19: not JSON" in reading.reasons[0]
    path.write_text("\n".join(good + bad))
    error = refusal(path)
    assert error.code == "bad_source" and "5 of 23 records" in error.cause and "not JSON" in error.cause


def test_bytes_that_are_no_utf8_and_damaged_archives_are_skipped(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n:02}.txt").write_text(f"document {n}")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "y.jsonl.gz").write_bytes(b"no gzip at all")
    found, reading = read(tmp_path)
    assert len(found) == 30 and reading.skipped == 2


@pytest.mark.parametrize(
    ("make", "code"),
    [("missing", "no_source"), ("empty folder", "no_text"), ("blank file", "no_text"), ("glob", "no_text")],
)
def test_sources_without_text_give_one_clear_error(tmp_path: Path, make: str, code: str) -> None:
    place = tmp_path / "here"
    if make in ("empty folder", "blank file"):
        place.mkdir()
    if make == "blank file":
        (place / "a.txt").write_text(" \n\n ")
    error = refusal(place if make != "glob" else tmp_path / "*.txt")
    assert error.code == code and str(tmp_path) in error.cause and error.remedy


def test_parquet_in_finewebs_schema_or_a_clear_word_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        path.write_bytes(b"PAR1")
        error = refusal(path)
        assert error.code == "missing_extra" and "iota-train[parquet]" in error.remedy
        return
    table = pyarrow.table({"text": [f"text {n}" for n in range(300)], "id": list(range(300))})
    pyarrow.parquet.write_table(table, path)
    assert [d.text for d in read(path)[0]] == [f"text {n}" for n in range(300)]
    error = refusal(path, column="body")
    assert error.code == "no_column" and "text, id" in error.remedy
    path.write_bytes(b"PAR1 and nothing else")
    assert refusal(path).code == "bad_source"


# ----------------------------------------------------------------------------------------------------- held-out


def run_split(found: list[Document], share: float, room: int = 10**9, seed: int = 3) -> tuple[Split, list[Document]]:
    split = Split(seed, share, room)
    for document in found:
        split.consider(document)
    return split, [document for document in found if split.train(document)]


def test_the_split_is_by_document_stable_and_disjoint() -> None:
    found = [Document(str(n), "txt", prose(n, 100)) for n in range(400)]
    split, train = run_split(found, 0.1)
    held = list(split.heldout())
    assert 20 <= len(found) - len(train) <= 60 and split.dropped == 0
    assert sorted("".join(d.text for d in found if d not in train)) == sorted("".join(held))
    backwards, again = run_split(found[::-1], 0.1)
    assert again[::-1] == train and list(backwards.heldout()) == held
    assert run_split(found, 0.1, seed=4)[1] != train


def test_near_duplicates_of_training_text_leave_the_held_out_set() -> None:
    found = [Document(str(n), "txt", prose(n, 120)) for n in range(200)]
    first, train = run_split(found, 0.1)
    held = [document for document in found if document not in train]
    # Edited copies of three held-out documents, and documents that share a third of three others.
    copies = [Document(f"copy {d.name}", "txt", f"NEW   start {d.name} " + d.text.upper()) for d in held[:3]]
    parts = [Document(f"part {d.name}", "txt", d.text[: len(d.text) // 3] + prose(999, 99)) for d in held[3:6]]
    split, more = run_split(found + copies + parts, 0.1)
    assert all(document in more for document in train)
    gone = [d for d in copies if d in more]
    list(split.heldout())
    assert split.dropped == len(gone) > 0
    text = "".join(split.heldout())
    assert all(d.text not in text for d in held[:3] if Document(f"copy {d.name}", *copies[0][1:]) in gone)
    assert all(d.text in "".join(first.heldout()) for d in held)


def test_room_bounds_memory_and_gives_the_rest_back_to_training() -> None:
    found = [Document(str(n), "txt", prose(n, 100)) for n in range(300)]
    _, all_train = run_split(found, 0.5)
    split, train = run_split(found, 0.5, room=5_000)
    assert len(train) > len(all_train)
    assert 0 < sum(len(piece) for piece in split.heldout()) <= 5_000


def test_every_kind_of_text_is_represented_in_proportion() -> None:
    found = [Document(f"{kind}{n}", kind, prose(hash_of(kind) + n, 100)) for kind, many in
             (("a", 600), ("b", 300), ("c", 20)) for n in range(many)]  # fmt: skip
    split, train = run_split(found, 0.1)
    kind_of = {piece: d.kind for d in found if d not in train for piece in (d.text,)}
    order = [kind_of[piece] for piece in split.heldout() if piece in kind_of]
    assert {"a", "b", "c"} <= set(order)
    assert 0.55 < order[:24].count("a") / 24 < 0.75 and order[:3].count("a") >= 1


def hash_of(kind: str) -> int:
    return ord(kind) * 10_000


def test_shingles_find_wording_wherever_it_stands() -> None:
    text = prose(1, 200)
    moved = "something else entirely, then: " + text.upper().replace(" ", "\n ") + " and an end"
    assert np.isin(shingles(text), shingles(moved)).mean() > 0.9
    assert np.isin(shingles(text), shingles(prose(2, 200))).mean() < 0.05
    assert shingles("").size == shingles("short").size == 1


# ------------------------------------------------------------------------------------------------------ trigram


def test_trigram_matches_a_plain_computation_of_interpolated_kneser_ney() -> None:
    draw = np.random.default_rng(0)
    train = draw.integers(97, 103, 400).astype(np.uint8)
    test = draw.integers(96, 104, 60).astype(np.uint8)
    model = Trigram()
    for start in range(0, 400, 37):  # in uneven stretches: trigrams across their borders count too
        model.add(train[start : start + 37])
    three = Counter(zip(train.tolist(), train[1:].tolist(), train[2:].tolist(), strict=False))
    two = Counter((b, c) for _, b, c in three)
    one = Counter(c for _, c in two)

    def discount(counts: Counter) -> float:
        once, twice = sum(v == 1 for v in counts.values()), sum(v == 2 for v in counts.values())
        return once / (once + 2 * twice) if once else 0.5

    def p(counts: Counter, context: tuple, last: int, lower: float) -> float:
        row = {key[-1]: v for key, v in counts.items() if key[:-1] == context}
        total = sum(row.values())
        if not total:
            return lower
        return (max(row.get(last, 0) - discount(counts), 0) + discount(counts) * len(row) * lower) / total

    nats = []
    for a, b, c in zip(test.tolist(), test[1:].tolist(), test[2:].tolist(), strict=False):
        unigram = p(Counter({(k,): v for k, v in one.items()}), (), c, 1 / 256)
        nats.append(-np.log(p(three, (a, b), c, p(two, (b,), c, unigram))))
    assert model.loss(test) == pytest.approx(np.mean(nats), rel=1e-12)


def test_an_unfitted_trigram_knows_nothing() -> None:
    assert Trigram().loss(np.arange(50, dtype=np.uint8)) == pytest.approx(np.log(256))
