"""The configuration: it loads to what was written, and every wrong value is named with what to do."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.config import Config, LimitsConfig, MetricsConfig, from_dict, load, to_dict
from tandem.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


ORIGINS = ("*", "https://app.example", "http://localhost:3000", "http://[::1]:3000", "chrome-extension://abc")
_UPPER = {
    "http.port": 65535,
    "transport.quarantine_cap": 1,
    "cache.memory_share": 0.95,
    "scheduling.unacknowledged_share": 1,
    "limits.retry_budget": 1,
    "limits.most_urgent_priority": 0,
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One key with its dotted path, type and bounds."""

    path: str
    hint: Any
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]

    def tree(self, value: object) -> dict[str, Any]:
        nested: Any = value
        for name in reversed(self.path.split(".")):
            nested = {name: nested}
        return typing.cast(dict[str, Any], nested)


def leaves(section: Any = Config, path: str = "") -> list[Leaf]:
    found = []
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        full = f"{path}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(hints[field.name]):
            found += leaves(hints[field.name], full)
        else:
            meta = field.metadata
            found.append(Leaf(full, hints[field.name], meta["minimum"], meta["maximum"], meta["choices"]))
    return found


LEAVES = leaves()
WRONG_TYPES: dict[Any, list[object]] = {
    int: ["7", 7.5, True, None, [7]],
    float: ["7", True, None, [7.0]],
    bool: [1, "true", None],
    str: [7, True, None, ["a"]],
    tuple[str, ...]: ["a", 7, [1, 2], {"a": "b"}],
}


def refusal(tree: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree)
    return caught.value


def ids(leaf: Leaf) -> str:
    return leaf.path


# -- what is right


def test_nothing_written_gives_the_defaults(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert load(None) == load(empty) == Config()


def test_shipped_file_loads_to_the_defaults_and_names_every_key() -> None:
    text = (ROOT / "tandem.yaml").read_text()
    assert load(ROOT / "tandem.yaml") == Config()
    assert all(f"{leaf.path.rpartition('.')[2]}:" in text for leaf in LEAVES)


def test_empty_section_means_its_defaults() -> None:
    assert from_dict({"cache": None, "pools": {"decode": None}}) == Config()


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("http: {host: 0.0.0.0, port: 9000}\n")
    config = load(path, {"http.port": 9001, "pools.prefill.workers": 3})
    assert (config.http.host, config.http.port, config.pools.prefill.workers) == ("0.0.0.0", 9001, 3)
    assert config.pools.decode == Config().pools.decode


def test_whole_numbers_stand_for_numbers() -> None:
    lease_s = from_dict({"transport": {"lease_s": 5}}).transport.lease_s
    assert (lease_s, type(lease_s)) == (5.0, float)


def _values(leaf: Leaf) -> st.SearchStrategy[Any]:
    if leaf.path == "http.cors_origins":
        return st.lists(st.sampled_from(ORIGINS)).map(tuple)
    if leaf.path == "tracing.otlp_endpoint":
        return st.sampled_from(["", "http://collector:4318", "https://[::1]:4318/v1/traces"])
    if leaf.path.endswith(".gpus"):
        return st.one_of(st.integers(0, 8).map(float), st.sampled_from([0.0001, 0.25, 0.3333]))
    if leaf.choices:
        return st.sampled_from(leaf.choices)
    least = leaf.minimum or 0
    upper = _UPPER.get(leaf.path, leaf.maximum)
    if leaf.hint is int:
        return st.integers(int(least), 1 << 40 if upper is None else int(upper))
    if leaf.hint is float:
        return st.floats(least, upper or 1e9)
    return {bool: st.booleans(), str: st.text(), tuple[str, ...]: st.lists(st.text()).map(tuple)}[leaf.hint]


_RELATED = {
    "cache.dtype", "cache.page_size", "cache.prefix_cache", "model.engine", "model.quantize", "model.time_model",
    "scheduling.chunk_size", "scheduling.max_num_batched_tokens", "scheduling.max_num_seqs",
}  # fmt: skip
_RELATED |= {f"pools.{role}.{key}" for role in ("prefill", "decode") for key in ("workers", "min", "max")}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    tree: dict[str, Any] = {}
    for leaf in LEAVES:
        if leaf.path in _RELATED:
            continue
        section = tree
        *parents, last = leaf.path.split(".")
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = draw(_values(leaf))
    page_size = draw(st.integers(1, 512))
    chunk_size = page_size * draw(st.integers(1, 16))
    tree["cache"]["page_size"] = page_size
    tree["scheduling"]["chunk_size"] = chunk_size
    tree["scheduling"]["max_num_batched_tokens"] = chunk_size + draw(st.integers(0, 4096))
    tree["scheduling"]["max_num_seqs"] = draw(st.integers(0, tree["scheduling"]["max_num_batched_tokens"]))
    if draw(st.booleans()):
        tree["model"] |= {"engine": "simulated", "time_model": draw(st.text(min_size=1))}
        tree["speculation"]["draft_model"] = ""
        for role in ("prefill", "decode"):
            tree["pools"][role]["gpus"] = 0.0
    if tree["pools"]["flexible"]:
        tree["pools"]["decode"]["gpus"] = tree["pools"]["prefill"]["gpus"]
    for role in ("prefill", "decode"):
        least, workers, most = sorted(draw(st.integers(1, 1024)) for _ in range(3))
        sizes = draw(st.sampled_from([(workers, 0, 0), (workers, least, most), (1, least, most), (workers, 0, most)]))
        tree["pools"][role] |= dict(zip(("workers", "min", "max"), sizes, strict=True))
    return from_dict(tree)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(configs())
def test_plain_data_and_back(config: Config) -> None:
    assert from_dict(to_dict(config)) == config


# -- what is wrong


@pytest.mark.parametrize("leaf", LEAVES, ids=ids)
def test_wrong_type_is_named(leaf: Leaf) -> None:
    for value in WRONG_TYPES[leaf.hint]:
        error = refusal(leaf.tree(value))
        assert error.key == leaf.path
        assert error.message.startswith(leaf.path)
        assert "must be" in error.message
        assert repr(value) in error.message


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.minimum is not None], ids=ids)
def test_value_below_its_minimum_is_named_with_the_minimum(leaf: Leaf) -> None:
    assert leaf.minimum is not None
    error = refusal(leaf.tree(leaf.hint(leaf.minimum - 1)))
    assert error.key == leaf.path
    assert f"{leaf.path} is" in error.message
    assert f"at least {leaf.minimum}" in error.message


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.maximum is not None], ids=ids)
def test_value_above_its_maximum_is_named_with_the_maximum(leaf: Leaf) -> None:
    assert leaf.maximum is not None
    error = refusal(leaf.tree(leaf.hint(leaf.maximum + 1)))
    assert error.key == leaf.path
    assert f"{leaf.path} is" in error.message
    assert f"at most {leaf.maximum}" in error.message


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.choices], ids=ids)
def test_unknown_choice_is_answered_with_the_choices(leaf: Leaf) -> None:
    error = refusal(leaf.tree("infiniband"))
    assert error.key == leaf.path
    assert all(choice in error.message for choice in leaf.choices)


@pytest.mark.parametrize(
    ("tree", "path", "hint"),
    [
        ({"modle": {}}, "modle", "model"),
        ({"cache": {"page_sise": 32}}, "cache.page_sise", "page_size"),
        ({"pools": {"prefill": {"count": 2}}}, "pools.prefill.count", "workers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_key_is_answered_with_its_path_and_the_known_keys(tree: Any, path: str, hint: str) -> None:
    error = refusal(tree)
    assert error.key == path
    assert f"unknown key {path}" in error.message
    assert hint in error.message.partition("known here")[2]


@pytest.mark.parametrize(
    ("tree", "key", "remedy"),
    [
        ({"scheduling": {"chunk_size": 100}}, "scheduling.chunk_size", "multiple of cache.page_size (32)"),
        ({"cache": {"page_size": 768}}, "scheduling.chunk_size", "multiple of cache.page_size (768)"),
        (
            {"scheduling": {"max_num_batched_tokens": 256}},
            "scheduling.max_num_batched_tokens",
            "at least scheduling.chunk_size (512)",
        ),
        (
            {"scheduling": {"max_num_batched_tokens": 512, "max_num_seqs": 513}},
            "scheduling.max_num_seqs",
            "more than scheduling.max_num_batched_tokens (512)",
        ),
        ({"tracing": {"otlp_endpoint": "collector:4318"}}, "tracing.otlp_endpoint", "http://collector:4318"),
        ({"cache": {"memory_share": 0.96}}, "cache.memory_share", "at most 0.95"),
        ({"transport": {"quarantine_cap": 1.01}}, "transport.quarantine_cap", "at most 1"),
        ({"http": {"port": 65536}}, "http.port", "at most 65535"),
        ({"pools": {"decode": {"workers": 5, "max": 4}}}, "pools.decode.workers", "more than pools.decode.max (4)"),
        ({"pools": {"prefill": {"min": 5, "max": 4}}}, "pools.prefill.min", "raise pools.prefill.max"),
        ({"pools": {"prefill": {"min": 5}}}, "pools.prefill.min", "pools.prefill.max is not set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_go_together(tree: Any, key: str, remedy: str) -> None:
    error = refusal(tree)
    assert error.key == key
    assert key in error.message
    assert remedy in error.message


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"workers": 3}, (3, 3, 3)),
        ({"max": 4}, (1, 1, 4)),
        ({"workers": 2, "max": 4}, (2, 2, 4)),
        ({"min": 2, "max": 4}, (2, 2, 4)),
        ({"workers": 3, "min": 2, "max": 4}, (3, 2, 4)),
        ({"min": 4, "max": 4}, (4, 4, 4)),
    ],
    ids=str,
)
def test_a_pool_begins_within_its_bounds(keys: dict[str, int], sizes: tuple[int, int, int]) -> None:
    pool = from_dict({"pools": {"decode": keys}}).pools.decode
    assert (pool.at_first, pool.least, pool.most) == sizes


@pytest.mark.parametrize("tree", [{"cache": 7}, {"pools": {"decode": ["workers"]}}, {"http": "127.0.0.1:80"}])
def test_section_that_is_no_mapping(tree: Any) -> None:
    error = refusal(tree)
    assert "must hold keys and values" in error.message
    assert error.key is not None
    assert error.message.startswith(error.key)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml.*--config"):
        load(tmp_path / "absent.yaml")


def test_file_that_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("http: {port: 8000\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML: [\s\S]*line 2"):
        load(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"http:\n  port: [1, 2\nmodel: {}\n", "line 3, column 6: while parsing a flow sequence, expected ',' or ']'"),
        (b"http:\n\tport: 1\n", "line 2, column 1: while scanning for the next token, found character"),
        (b'model: {path: "x', "line 1, column 17: while scanning a quoted scalar, found unexpected end of stream"),
        (b"http:\n  host: \xff\n", "line 2, column 9: a byte that is not UTF-8"),
        (b"http:\n  host: \x01\n", "line 2, column 9: the character '\\x01'"),
        (b"http: !secret x\n", "line 1, column 7: could not determine a constructor for the tag '!secret'"),
        (b"http: {}\n---\nmodel: {}\n", "line 2, column 1: expected a single document in the stream"),
    ],
)
def test_the_place_where_it_is_not_yaml_is_told_in_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message.startswith(f"{path} is not YAML: {says}")
    assert "\n" not in caught.value.message


@pytest.mark.long
@pytest.mark.parametrize("text", ["model:\n  path: 2024-13-45\n", "cache: !!int ''\n", "[" * 5000])
def test_a_file_with_a_value_that_cannot_be_read_is_not_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML: it holds a value"):
        load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("on: 1\n", "unknown key True is bool to YAML, and no text; known here: model, pools"),
        ("8000: 1\n", "unknown key 8000 is int to YAML, and no text; known here: model, pools"),
        ("cache:\n  no:\n", "unknown key cache.False is bool to YAML, and no text; known here: page_size"),
    ],
)
def test_a_key_that_is_no_name_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "8000\n", "false\n", "[]\n"])
def test_file_that_holds_no_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"list\.yaml must hold keys and values"):
        load(path)


def test_override_through_a_plain_value(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("http: 8000\n")
    with pytest.raises(ConfigError, match=r"http\.port: http must hold keys"):
        load(path, {"http.port": 9000})


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().http.port = 9000  # type: ignore[misc]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 10**400, -(10**400)], ids=["nan", "inf", "great", "deep"]
)
def test_a_number_must_be_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"transport\.lease_s must be a finite number"):
        from_dict({"transport": {"lease_s": value}})


@pytest.mark.parametrize("text", ["1e1", "1.0e1", ".1E2", "100e-1", "10", "1.0e+1"])
def test_a_number_may_be_written_with_a_power_of_ten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(f"transport:\n  lease_s: {text}\n")
    assert load(file).transport.lease_s == 10.0


def test_an_empty_section_takes_overrides(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("http:\n  # port: 1\n")
    assert load(file, {"http.port": 9000}).http.port == 9000


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"port": 9000}, "unknown key port; did you mean http.port?"),
        ({"workers": 2}, "unknown key workers; did you mean pools.prefill.workers or pools.decode.workers?"),
        ({"http": {"prot": 9000}}, "unknown key http.prot; did you mean port?"),
        ({"modle": {}}, "unknown key modle; did you mean model?"),
        ({"http": {"qqqq": 1}}, "unknown key http.qqqq; known here: host, port"),
    ],
)
def test_an_unknown_key_comes_with_a_suggestion(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree)
    assert says in caught.value.message


@pytest.mark.parametrize("origin", ["https://app.example/", "app.example", "https://*.example", "https://a/b", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin") as caught:
        load(None, {"http.cors_origins": [origin]})
    assert caught.value.key == "http.cors_origins"


def test_origins() -> None:
    assert load(None, {"http.cors_origins": list(ORIGINS)}).http.cors_origins == ORIGINS


def test_a_configuration_of_a_version_with_fewer_keys_has_the_defaults_of_the_others() -> None:
    """Workers of the next version get the configuration that the running one has pickled."""
    config = load(None, {"limits.max_choices": 3})
    state = {name: section for name, section in vars(config).items() if name != "metrics"}
    vars(state["limits"]).pop("max_logprobs")
    later = Config.__new__(Config)
    later.__setstate__(state)
    assert (later.limits.max_choices, later.limits.max_logprobs) == (3, LimitsConfig().max_logprobs)
    assert later.metrics == MetricsConfig()


def test_a_pool_that_follows_its_load_begins_with_a_worker() -> None:
    with pytest.raises(ConfigError, match="begins with none") as caught:
        from_dict({"pools": {"prefill": {"workers": 0, "max": 3}}})
    assert caught.value.key == "pools.prefill.max"
    assert from_dict({"pools": {"prefill": {"workers": 0, "min": 1, "max": 3}}}).pools.prefill.at_first == 1
    assert from_dict({"pools": {"prefill": {"workers": 0}}}).pools.prefill.most == 0


def test_without_prefill_workers_decode_follows_no_load() -> None:
    with pytest.raises(ConfigError, match="cannot without prefill workers") as caught:
        from_dict({"pools": {"prefill": {"workers": 0}, "decode": {"max": 3}}})
    assert caught.value.key == "pools.decode.max"
    assert from_dict({"pools": {"prefill": {"workers": 0}, "decode": {"workers": 3}}}).pools.decode.most == 3


@pytest.mark.parametrize(("section", "key"), [("cache", "dtype"), ("model", "quantize")])
def test_a_simulated_engine_has_no_types(section: str, key: str) -> None:
    tree: dict[str, Any] = {"model": {"engine": "simulated", "time_model": "t.yaml"}}
    tree.setdefault(section, {})[key] = "int8"
    with pytest.raises(ConfigError, match="a simulated engine has no use for") as caught:
        from_dict(tree)
    assert caught.value.key == f"{section}.{key}"


@pytest.mark.parametrize("gpus", [1.5, 0.00001, 1 / 3])
def test_gpus_that_ray_does_not_give_are_refused(gpus: float) -> None:
    with pytest.raises(ConfigError, match="give a worker a whole number of GPUs, or a part of one") as caught:
        load(None, {"pools.decode.gpus": gpus})
    assert caught.value.key == "pools.decode.gpus"


@pytest.mark.parametrize("gpus", [0, 0.25, 1, 8])
def test_whole_gpus_and_parts_of_one_are_taken(gpus: float) -> None:
    assert load(None, {"pools.decode.gpus": gpus}).pools.decode.gpus == gpus
