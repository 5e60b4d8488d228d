"""If these fail, a command prints, writes or exits with something else than its transcript says."""

import os
from pathlib import Path

import pytest

import golden_messages
import transcripts
from paths import ROOT

FILES = sorted((ROOT / "tests" / "transcripts").rglob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=[path.stem for path in FILES])
def test_transcripts(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    golden_messages.check(transcripts, file, tmp_path, monkeypatch, pytestconfig)


FILE = r"""A heading stays.

$ cat > a.graph
> one
>
> two
>>> from pathlib import Path
>>> for n in range(2):
...     print(n)
  0
$ cat a.graph
  an old line

$ LNGEN_DEBUG=2 lngen --version | mask "ver(.)" "$"
$ lngen show rmsnorm.fwd:d=64 --schedule {0} | grep __global__ | mask "\(.*" | count
$ lngen show rmsnorm.fwd:d=64 --schedule {0} --json | json spec
  "rmsnorm.fwd:d=64
$ lngen build rmsnorm.fwd:d=64 --emit cu --schedule {0} --out pack | head 0
>>> Path("a.graph").rename("b.graph").write_text("x" * 130)
$ lngen list nothing --out b.graph
"""
NOW = r"""A heading stays.

$ cat > a.graph
> one
>
> two
>>> from pathlib import Path
>>> for n in range(2):
...     print(n)
  0
  1
$ cat a.graph
  one

  two

$ LNGEN_DEBUG=2 lngen --version | mask "ver(.)" "$"
  lngen, $ion VERSION
$ lngen show rmsnorm.fwd:d=64 --schedule {0} | grep __global__ | mask "\(.*" | count
  1 lines
$ lngen show rmsnorm.fwd:d=64 --schedule {0} --json | json spec
  "rmsnorm.fwd:d=64,dtype=f32"
$ lngen build rmsnorm.fwd:d=64 --emit cu --schedule {0} --out pack | head 0
  + pack/ (1 cu, 8 cuh, 1 json)
>>> Path("a.graph").rename("b.graph").write_text("x" * 130)
  130
$ lngen list nothing --out b.graph
  ! error: spec 'nothing': there is no graph 'nothing', expected one of layernorm, rmsnorm, l2norm, add_layernorm, \
  add_rmsnorm, parallel_layernorm, parallel_rmsnorm, ada_layernorm, ada_rmsnorm, qk_rmsnorm, qk_layernorm, rope, \
  gated_layernorm, gated_rmsnorm, layernorm_sigmoid_mul, rmsnorm_sigmoid_mul, layernorm_act, rmsnorm_act, dyt, \
  softmax, log_softmax, cross_entropy.
  exit 2
"""
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"


def test_a_transcript_has_what_is_printed_written_and_exited_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, given in (("a", FILE), ("b", NOW)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert transcripts.rewritten(given.replace("{0}", ALL_KEYS), tmp_path / name) == NOW.replace("{0}", ALL_KEYS)
    assert "LNGEN_DEBUG" not in os.environ


def test_what_no_user_should_see_is_no_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transcripts.changes({"a": b"", "b": b"", "c": b""}, {"b": b"x", "c": b"", "d": b""}) == ["- a", "* b", "+ d"]

    def fails(*_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("lngen.cli.inspection._described", fails)
    assert len(transcripts.unmeant(transcripts.rewritten("$ lngen list\n", tmp_path))) == 1
    for line in ("$ rm -r x", "$ lngen --version | sort"):
        with pytest.raises((AssertionError, ValueError), match="expected"):
            transcripts.rewritten(line, tmp_path)
