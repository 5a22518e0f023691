from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shared.errors import ConfigError
from worker.engines.profiles import PROFILES, LatencyProfile, load_profile

PROFILE = LatencyProfile("own", 0.01, 5e-9, 0.0, 1e-5, 2e-7, kv_capacity_tokens=4096)


def test_shipped_profiles_are_what_rooflines_say():
    a100, h100 = load_profile("13b-a100"), load_profile("13b-h100")
    # 26 GB of weights at 2.039 TB/s, and 26 GFLOP a token at 312 TFLOP/s: no step is faster than the hardware.
    assert a100.step_s > 26e9 / 2.039e12
    assert a100.prefill_s_per_token > 26e9 / 312e12
    assert h100.step_s > 26e9 / 3.35e12
    assert h100.prefill_s_per_token > 26e9 / 989e12
    assert (a100.step_budget_tokens, h100.step_budget_tokens) == (2048, 8192)
    # 80 GB less the weights hold some 55,000 tokens of 819,200 bytes: about 860 blocks of 64.
    assert a100.kv_capacity_tokens is not None
    assert 850 <= a100.kv_capacity_tokens // 64 <= 870
    assert sorted(PROFILES) == ["13b-a100", "13b-h100"]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_profile_comes_back_from_its_file(tmp_path: Path, suffix: str):
    path = tmp_path / f"profile{suffix}"
    path.write_text(PROFILE.to_yaml() if suffix == ".yaml" else json.dumps(asdict(PROFILE)))
    assert load_profile(str(path)) == PROFILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "holds no mapping"),
        ("name: x\nstep_s: 1\nspeed: 3", "unknown: speed; missing: decode_s_per_context_token, decode_s_per_seq"),
        (PROFILE.to_yaml().replace("step_s: 0.01", "step_s: -1"), "profile own: step_s: -1 is not a time"),
        (PROFILE.to_yaml().replace("step_s: 0.01", "step_s: fast"), "profile own: step_s: 'fast' is not a time"),
        (PROFILE.to_yaml().replace("step_s: 0.01", "step_s: .inf"), "profile own: step_s: inf is not a time"),
        (PROFILE.to_yaml().replace("4096", "0"), "profile own: kv_capacity_tokens: 0 is not a positive number"),
        (PROFILE.to_yaml().replace("own", "[1]"), r"name: \[1\] is not a name"),
        ("{", "is neither YAML nor JSON"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path))


def test_a_name_that_is_neither_profile_nor_file_lists_the_profiles():
    with pytest.raises(ConfigError, match=r"--profile: nonsense: neither a profile \(13b-a100, 13b-h100\) nor a file"):
        load_profile("nonsense")


def test_a_step_that_takes_no_time_is_refused():
    with pytest.raises(ConfigError, match="profile own: a step must take time"):
        replace(PROFILE, step_s=0.0, decode_s_per_seq=0.0)


def test_scaling_slows_every_term_and_no_limit():
    slow = PROFILE.scaled(10.0)
    assert asdict(slow) == pytest.approx(
        asdict(PROFILE)
        | {
            "request_s": 0.0,
            "step_s": 0.1,
            "prefill_s_per_token": 5e-8,
            "decode_s_per_seq": 1e-4,
            "decode_s_per_context_token": 2e-6,
        }
    )
