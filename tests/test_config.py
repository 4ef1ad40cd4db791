"""Run files: what is refused, in which words, and that what is accepted survives a round trip."""

from pathlib import Path

import msgspec
import pytest

from iota.config.load import check, load_run, parse_run, save_run
from iota.config.schema import RunConfig, Section
from iota.errors import ConfigError

RECIPES = sorted(p for p in (Path(__file__).parent.parent / "recipes").glob("*.toml") if p.stem != "fleet")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(parse_run(text))
    return str(caught.value)


def section(name: str, line: str) -> str:
    return f'name = "a"\n[{name}]\n{line}\n'


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_pass_and_round_trip(path: Path) -> None:
    config = load_run(path)
    checked = check(config)
    assert check(checked) == checked
    assert parse_run(save_run(config)) == config
    assert parse_run(save_run(checked)) == checked


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"demo", "tiny", "one_stage"}


def test_defaults_pass_and_derived_values_are_filled() -> None:
    config = check(RunConfig(name="a"))
    assert config.model.ffn == 704  # 8/3 of 256 rounded up to a multiple of 32
    assert config.train.max_in_flight == 4
    assert config.train.lr_tokens == 500_000
    tokens = check(parse_run('name = "a"\nstop = "tokens >= 2e6 or epochs >= 9"'))
    assert tokens.train.lr_tokens == 2_000_000


def test_unknown_keys_name_section_valid_keys_and_a_guess() -> None:
    text = refused(section("train", "batc = 3"))
    assert "'batc' in section [train]" in text and "Did you mean 'batch'" in text and "weight_decay" in text
    assert "It belongs in [model]" in refused(section("merge", "width = 3"))
    assert "Did you mean 'stop'" in refused('name = "a"\nstpo = "x"')
    assert "name is missing" in refused("seed = 1")


@pytest.mark.parametrize(
    ("name", "line", "wanted"),
    [
        ("train", 'lr = "fast"', 'train.lr = "fast" is a text; write a finite number'),
        ("train", "clip = true", "train.clip = true is true/false"),
        ("train", "lr = nan", "train.lr = NaN is not finite"),
        ("train", "batch = 2.5", "train.batch = 2.5 is a fraction; write a whole number"),
        ("train", f"batch = {2**64}", "too large"),
        ("train", f"lr = {10**400}", "too large"),
        ("model", "tie_embeddings = 1", "write true or false"),
        ("admit", "allow = [1]", "admit.allow = [1] is a list; write a list, each item a text"),
        ("admit", 'validators = {a = "x"}', "write a table, each value a whole number"),
    ],
)
def test_wrong_types_name_key_value_and_what_to_write(name: str, line: str, wanted: str) -> None:
    assert wanted in refused(section(name, line))


@pytest.mark.parametrize(
    ("name", "line", "wanted"),
    [
        ("stages", "count = 7", "stages.count = 7 is more than model.blocks = 6"),
        ("model", "heads = 3", "model.heads = 3 does not divide model.width = 256"),
        ("model", "heads = 4\nkv_heads = 3", "model.kv_heads = 3 does not divide model.heads = 4"),
        ("model", "width = 12\nheads = 4\nkv_heads = 2", "heads of 3 channels"),
        ("model", "heads = 0", "model.heads = 0 is out of range; write a number of at least 1"),
        ("model", "tie_embeddings = true", "model.tie_embeddings = true needs one stage, stages.count = 3"),
        ("model", "vocabulary = 255", "write at least 256"),
        ("stages", 'codec = "bottleneck"\nchannels = 257', "stages.channels = 257 is more than model.width = 256"),
        ("stages", 'codec = "zip"', "stages.codec = 'zip' is not known; write one of: identity, int8"),
        ("stages", 'wire_dtype = "int4"', "write one of: float32, bfloat16"),
        ("data", "heldout_share = 0", "data.heldout_share = 0.0 is out of range"),
        ("data", "heldout_tokens = 256", "write at least model.sequence + 1 = 257"),
        ("data", 'source = ""', "data.source is empty"),
        ("train", "batch = 0", "train.batch = 0 is out of range"),
        ("train", "accumulate = 0", "train.accumulate = 0 is out of range"),
        ("train", "clip = 0", "train.clip = 0.0 is out of range; write a number of more than 0"),
        ("train", "clip = -1.0", "train.clip = -1.0"),
        ("train", "beta2 = 1", "at least 0 and less than 1"),
        ("train", "warmup_tokens = 0", "train.lr_tokens = 0 means"),
        ("train", "warmup_tokens = 9\nlr_tokens = 8", "train.warmup_tokens = 9 is more than train.lr_tokens = 8"),
        ("train", 'pipeline = "sync"', "write one of: asynchronous, synchronous"),
        ("merge", "quorum = 0", "merge.quorum = 0.0 is out of range; write a number of more than 0 and at most 1"),
        ("merge", "quorum = 1.1", "merge.quorum = 1.1"),
        ("merge", "min_batches = 0", "merge.min_batches = 0"),
        ("merge", 'outer = "adam"', "write one of: nesterov, assign"),
        ("audit", "share = 1.5", "audit.share = 1.5"),
        ("audit", "segment_steps = 0", "audit.segment_steps = 0"),
        ("pay", "burn = -0.1", "pay.burn = -0.1"),
        ("admit", 'operators = ["ab"]', "admit.operators holds 'ab', no key"),
        ("limits", "silence = 5", "limits.silence = 5.0 is not more than limits.poll = 10.0"),
        ("limits", "grace = -1", "limits.grace = -1.0"),
        ("swarm", "port = 0", "swarm.port = 0 is out of range; write a number of at least 1 and at most 65535"),
        ("swarm", "blob_port = 8400", "equals swarm.port"),
        ("swarm", 'host = "0.0.0.0"', "swarm.public_url is missing"),
        ("swarm", 'public_url = "http://0.0.0.0:80"', "cannot be reached"),
        ("swarm", 'blob_url = "http://x:0"', "cannot be reached"),
        ("swarm", 'public_url = "ftp://x"', "cannot be reached"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(name: str, line: str, wanted: str) -> None:
    assert wanted in refused(section(name, line))


@pytest.mark.parametrize("name", ["", "Demo", "a b", "x" * 41, "../up", "a\n"])
def test_names_follow_the_grammar(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run"):
        check(RunConfig(name=name))


def test_a_stop_rule_that_cannot_be_parsed_is_refused_before_anything_is_built() -> None:
    assert "loss" in refused('name = "a"\nstop = "epocs >= 3"')
    with pytest.raises(ConfigError):
        check(RunConfig(name="a", stop=""))


def test_every_problem_is_reported_at_once_one_a_line() -> None:
    text = refused('name = "A"\n[train]\nbatch = 0\nclip = 0\n[stages]\ncount = 9')
    assert text.startswith("run file: 4 problems\n") and text.count("\n") == 4


def test_an_explicit_zero_is_honoured() -> None:
    text = 'name = "0"\nseed = 0\n[train]\nlr = 0\nmin_lr_share = 0\nweight_decay = 0\nbeta1 = 0\n'
    text += "[merge]\nouter_lr = 0\nouter_momentum = 0\nrecompute_share = 0\n"
    text += "[audit]\nshare = 0\nsegments = 0\nredraws = 0\n"
    text += "[pay]\npool = 0\ngamma = 0\n[limits]\ngrace = 0\n[swarm]\nminers = 0\nvalidators = 0\n"
    config = check(parse_run(text))
    assert (config.seed, config.train.lr, config.merge.outer_lr, config.merge.outer_momentum) == (0, 0.0, 0.0, 0.0)
    assert (config.audit.share, config.audit.segments, config.pay.pool, config.pay.gamma) == (0.0, 0, 0, 0)
    assert (config.limits.grace, config.swarm.miners, config.swarm.validators) == (0, 0, 0)


def test_round_trip_of_odd_texts_and_of_every_field() -> None:
    config = RunConfig(name="a", folder='C:\\x "y"\n\t\x7f\x00é', stop="epochs >= 1")
    key = "ab" * 32
    admit = msgspec.structs.replace(config.admit, allow=(key,), validators={key: 3, "b c": 1})
    config = msgspec.structs.replace(config, admit=admit)
    assert parse_run(save_run(config)) == config
    lines = save_run(config).splitlines()
    for name in RunConfig.__struct_fields__:
        value = getattr(config, name)
        names = value.__struct_fields__ if isinstance(value, Section) else (name,)
        assert all(any(line.startswith(f"{field} = ") for line in lines) for field in names)


def test_unreadable_files_give_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_run(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_run(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path / "latin.toml")


def test_a_boundary_tensor_too_large_for_a_message_is_refused_at_creation():
    config = parse_run('name = "x"\n[limits]\ninline_bytes = 1000\n', "here")
    with pytest.raises(ConfigError, match=r"524,288 bytes.*limits\.inline_bytes = 1,000"):
        check(config)
    one = parse_run('name = "x"\n[stages]\ncount = 1\n[limits]\ninline_bytes = 1000\n', "here")
    assert check(one).limits.inline_bytes == 1000, "a one-stage run has no boundary"
