"""The configuration object: every key, and every way to get one wrong."""

import dataclasses
import json
import pickle

import pytest

from slideformer_backend import ConfigError, SlideFormerConfig, SlideFormerError
from slideformer_backend.config import environment_settings, keys

# A value other than the default for each key.
VALUES = {
    "update": "immediate",
    "nonfinite": "raise",
    "cpu_threads": 3,
    "prefetch": 1,
    "pin_memory": False,
    "status": "lines",
    "gpu_memory": "20GiB",
    "host_memory": "100 GB",
    "recompute": "always",
    "activations": "host",
    "kernels": "rms_norm,gated",
    "lazy_logits": False,
    "weights": "nvme",
    "optimizer_states": "nvme",
    "nvme_path": "/scratch",
    "nvme_fraction": 0.5,
    "strategy": "lsp",
    "lsp": {"rank": 8},
    "state_dtype": "bf16",
    "trace": "trace.json",
    "report": "report.json",
}
LATER = [key.name for key in keys() if not key.metadata["built"]]


def test_the_keys_are_those_of_the_design():
    assert {key.name for key in keys()} == set(VALUES)
    assert not {"update", "nonfinite", "cpu_threads", "prefetch", "pin_memory"} & set(LATER)


@pytest.mark.parametrize("key", [key.name for key in keys() if key.metadata["built"]])
def test_a_key_whose_part_is_built_is_taken(key):
    assert SlideFormerConfig(**{key: VALUES[key]}) != SlideFormerConfig()


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("update", "immediate", "immediate"),
        ("update", "Exact", "exact"),
        ("activations", "NVMe", "nvme"),
        ("nonfinite", "as_plain", "as_plain"),
        ("nonfinite", "raise", "raise"),
        ("cpu_threads", 3, 3),
        ("cpu_threads", "14", 14),
        ("cpu_threads", "auto", "auto"),
        ("prefetch", "0", 0),
        ("pin_memory", False, False),
        ("pin_memory", "off", False),
        ("pin_memory", "yes", True),
        ("pin_memory", "AUTO", "auto"),
    ],
)
def test_values_come_into_one_form(key, given, kept):
    value = getattr(SlideFormerConfig.from_mapping({key: given}), key)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("update", "fast", "exact, immediate"),
        ("update", None, "exact, immediate"),
        ("nonfinite", True, "skip, raise, as_plain"),
        ("cpu_threads", 0, "whole number from 1"),
        ("cpu_threads", True, "whole number from 1"),
        ("cpu_threads", 2.5, "whole number from 1"),
        ("cpu_threads", "many", "whole number from 1"),
        ("prefetch", -1, "whole number from 0"),
        ("pin_memory", "maybe", "true or false"),
        ("pin_memory", 2, "true or false"),
        ("gpu_memory", "twenty", "size"),
        ("gpu_memory", 0, "size"),
        ("gpu_memory", True, "size"),
        ("nvme_fraction", 1.5, "0 to 1"),
        ("nvme_path", "", "path"),
        ("kernels", ["rms_norm", "swiglu"], "rms_norm, gated, rotary"),
        ("lsp", 3, "section"),
    ],
)
def test_a_bad_value_names_the_key_what_was_found_and_what_is_right(key, value, words):
    with pytest.raises(ConfigError) as caught:
        SlideFormerConfig.from_mapping({key: value}, source="sf.yaml")
    for part in ("sf.yaml", key, repr(value), words):
        assert part in str(caught.value)


@pytest.mark.parametrize("key", LATER)
def test_a_key_whose_part_is_not_built_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"{key}: this part of SlideFormer is not built yet"):
        SlideFormerConfig(**{key: VALUES[key]})


@pytest.mark.parametrize("key", LATER)
def test_a_key_whose_part_is_not_built_may_hold_its_default(key):
    default = {field.name: field.default for field in dataclasses.fields(SlideFormerConfig)}[key]
    assert SlideFormerConfig(**{key: default}) == SlideFormerConfig()


@pytest.mark.parametrize(
    ("typo", "near"),
    [("updat", "update"), ("nonfinit", "nonfinite"), ("pin", "pin_memory"), ("cpu-threads", "cpu_threads")],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(typo, near):
    with pytest.raises(ConfigError, match=f"unknown key '{typo}'.*did you mean '{near}'"):
        SlideFormerConfig.from_mapping({typo: 1})


def test_yaml_reads_off_as_false_and_that_still_means_off():
    assert SlideFormerConfig(kernels=False).kernels == "off"


def test_it_is_frozen_keyword_only_and_its_errors_are_ours_and_value_errors():
    config = SlideFormerConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.update = "immediate"
    with pytest.raises(TypeError):
        SlideFormerConfig("exact")
    with pytest.raises(ValueError, match="update"):
        SlideFormerConfig(update=1)
    assert issubclass(ConfigError, SlideFormerError)
    assert issubclass(SlideFormerError, RuntimeError)


def test_json_and_pickle_round_trip():
    config = SlideFormerConfig(update="immediate", cpu_threads=4, pin_memory=False)
    assert SlideFormerConfig.from_mapping(json.loads(config.to_json())) == config
    assert json.loads(SlideFormerConfig().to_json()) == {}
    assert pickle.loads(pickle.dumps(config)) == config
    error = ConfigError("subject.", found=1, expected=2, remedy="three")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.found, again.remedy) == (str(error), 1, "three")


def test_single_variables_go_over_the_json_of_the_launcher():
    environ = {"SLIDEFORMER_CONFIG": '{"update": "immediate", "prefetch": 3}', "SLIDEFORMER_UPDATE": "exact"}
    assert environment_settings(environ) == {"update": "exact", "prefetch": 3}
    assert SlideFormerConfig.from_env(environ) == SlideFormerConfig(prefetch=3)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLIDEFORMER_CONFIG": "{"}, "not valid JSON"),
        ({"SLIDEFORMER_CONFIG": "[1]"}, "JSON object"),
        ({"SLIDEFORMER_CONFIG": '{"updte": 1}'}, "did you mean 'update'"),
        ({"SLIDEFORMER_UPDTE": "exact"}, "did you mean 'update'"),
        ({"SLIDEFORMER_UPDATE": "later"}, "exact, immediate"),
    ],
)
def test_a_wrong_variable_is_refused_not_ignored(environ, words):
    with pytest.raises(ConfigError, match=words):
        SlideFormerConfig.from_env(environ)


def test_switches_that_are_no_keys_are_left_alone():
    environ = {"SLIDEFORMER_DISABLE": "0", "SLIDEFORMER_TEST_DELAYS": "7", "OTHER": "x"}
    assert SlideFormerConfig.from_env(environ) == SlideFormerConfig()
