"""A report, an export or a picture says something else than its trials if these fail."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lngen.errors import LngenError, MissingError
from lngen.problem import Schedule, parse_schedule
from lngen.spec import parse_spec
from lngen.tune.job import Outcome, choose
from lngen.tune.views import FORMATS, _origin, against_default, export, plot, report_remarks
from lngen.version import __version__
from tune_cases import DEVICE, SCHEDULES, SPEC, TRIALS, trial


def test_the_defaults_are_held_against_what_tuning_found() -> None:
    tuned = Outcome(SPEC, 4096, DEVICE, tuple(TRIALS), choice=choose(TRIALS))
    untuned = replace(tuned, choice=choose(TRIALS[:1]))
    share = 10.0 / 12.0
    assert against_default([tuned]) == ""
    expected = f"The defaults reach {share**0.5:.3f} of the tuned speed on geometric mean, {share:.3f} at least."
    assert against_default([tuned, untuned]) == expected


def test_a_budget_too_short_to_compare_is_said() -> None:
    one = Outcome(SPEC, 4096, DEVICE, (TRIALS[0],), choice=choose(TRIALS[:1]))
    (text,) = report_remarks([one])
    assert text.endswith("ended before a second schedule was timed, so nothing is compared; give a larger --budget.")
    (text,) = report_remarks([replace(one, trials=tuple(TRIALS))])
    assert "run it again to try the candidates that are left" in text
    assert not [*report_remarks([replace(one, complete=True)])]


def test_t4_is_what_its_schema_asks_for() -> None:
    content = json.loads(export(TRIALS, "t4"))
    assert content["schema_version"] == "1.0.0"
    assert len(content["results"]) == len(TRIALS)
    for t, r in zip(TRIALS, content["results"], strict=True):
        assert {"configuration", "times", "invalidity", "correctness"} <= r.keys()
        assert r["invalidity"] == t.status
        assert r["correctness"] == (t.status == "correct")
        assert all(isinstance(v, (int, float)) for k, v in r["times"].items() if k != "runtimes")
        assert isinstance(r["times"]["runtimes"], list)
        assert all(isinstance(m["value"], (int, float)) and m["name"] for m in r["measurements"])
    first = content["results"][0]
    assert parse_schedule(SCHEDULES[0], Schedule("multipass", 32, 1, 1)) == Schedule(**first["configuration"])
    assert first["times"]["compilation_time"] == 80.5
    assert {"name": "time", "value": 0.012, "unit": "ms"} in first["measurements"]


def test_a_kernel_tuner_cache_has_its_layout() -> None:
    text = export(TRIALS, "kernel-tuner")
    assert text.endswith("}\n}")  # else Kernel Tuner takes it for torn
    content = json.loads(text)
    assert content["device_name"] == DEVICE.name
    assert content["kernel_name"] == parse_spec(SPEC).slug
    assert content["problem_size"] == [4096]
    keys = content["tune_params_keys"]
    assert keys == [*content["tune_params"]]
    assert len(content["cache"]) == len(TRIALS)
    needed = {"time", "compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"}
    for t, (key, entry) in zip(TRIALS, content["cache"].items(), strict=True):
        assert key == ",".join(str(entry[k]) for k in keys)
        assert all(entry[k] in content["tune_params"][k] for k in keys)
        assert needed | {"timestamp"} <= entry.keys()
        if t.timed:
            assert entry["time"] == pytest.approx(t.us_median / 1e3)  # type: ignore[operator]
        else:
            assert entry["time"] in ("InvalidConfig", "CompilationFailedConfig", "RuntimeFailedConfig")
    assert [e["time"] for e in content["cache"].values()][1:5:3] == ["CompilationFailedConfig", "InvalidConfig"]


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_the_same_every_time(form: str) -> None:
    assert export(TRIALS, form) == export(TRIALS, form)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_plot_shows_every_trial_and_is_the_same_every_time(tmp_path: Path, ending: str) -> None:
    a, b = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    plot(TRIALS, choose(TRIALS), a)
    plot(TRIALS, choose(TRIALS), b)
    assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [a.name, b.name]
    plot(TRIALS, None, b)
    assert a.read_bytes() != b.read_bytes()
    with pytest.raises(LngenError, match=r"cannot write '.*a\.(svg|png).c.*': (Not a directory|File exists)"):
        plot(TRIALS, None, a / f"c.{ending}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [a.name, b.name]


def test_the_plot_says_where_its_trials_come_from() -> None:
    made = [trial(device="NVIDIA H200", compiler="NVRTC 13.0", date=d) for d in ("2026-01-02", "", "2026-01-01")]
    assert _origin(made) == f"NVIDIA H200, NVRTC 13.0, lngen {__version__}, 2026-01-02"
    assert _origin([]) == ""


def test_a_plot_of_another_kind_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"\.\[plot\]"):
        plot(TRIALS, None, tmp_path / "a.png")
