"""Objects compiled by the DSL: what another process needs to load them, and what several processes make of one folder."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import toy

pytestmark = toy.needs_dsl

LOAD = """
function = cache.load("scale", toy.ScaleConfig(), "sm_90a")
try:
    function(1, 2, 3.0)
except TypeError as error:
    print(error)
print("cutlass" in sys.modules)
"""
REFUSED = "Mismatched type on argument #0 when calling: `__call__(x: Tensor([n0], float32), y: Tensor([n0], float32), "


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the toy in it, compiled by another process."""
    folder = tmp_path_factory.mktemp("cache")
    refused, dsl = toy.run(LOAD, folder).splitlines()
    assert refused.startswith(REFUSED)
    assert dsl == "True", "a first process compiles"
    return folder


def _objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_another_process_does_without_the_dsl(built: Path) -> None:
    (path,) = _objects(built)
    before = path.stat().st_mtime_ns
    refused, dsl = toy.run(LOAD, built).splitlines()
    assert refused.startswith(REFUSED), "the launch function is not the compiled one"
    assert dsl == "False"
    assert path.stat().st_mtime_ns == before
    assert re.fullmatch(r"scale-sm_90a-[0-9a-f]{16}\.so", path.name)
    assert '"factor": 2.0' in path.with_suffix(".json").read_text()


def test_an_object_has_its_preload(built: Path) -> None:
    code = f"""
from pathlib import Path
from deltafuse.runtime import build
import torch
function, preload = build.open_object(next(Path({str(built)!r}).glob("*.so")))
try:
    print(preload())
except RuntimeError as error:
    print(type(error).__name__, error)
print(torch.cuda.is_available())
"""
    said, gpu = toy.run(code, built).splitlines()
    # Without a driver its error arrives as an exception: the function runs, and reports as TVM-FFI functions do.
    assert said == "None" if gpu == "True" else re.match("RuntimeError .*[Cc]uda", said), said


def test_of_many_processes_one_compiles(tmp_path: Path) -> None:
    processes = [toy.start(LOAD, tmp_path) for _ in range(3)]
    answers = [toy.finish(process).splitlines() for process in processes]
    assert all(refused.startswith(REFUSED) for refused, _ in answers)
    assert [dsl for _, dsl in answers].count("True") == 1
    assert len(_objects(tmp_path)) == 1
    assert not list(tmp_path.glob(".part-*"))


CASES = {
    "sealed, but no library": "cache.store(entry, b'\\x7fELF, and then nothing of the kind', path.parent)",
    "cut short": "path.write_bytes(good[:3000])",
    "overwritten": "path.write_bytes(good[:5000] + bytes(100) + good[5100:])",
    "gone": "",
}


def test_what_cannot_be_loaded_is_replaced(built: Path, tmp_path: Path) -> None:
    (known,) = _objects(built)
    path = tmp_path / known.name
    path.write_bytes(known.read_bytes())
    code = f"""
from pathlib import Path
path, good = Path({str(path)!r}), Path({str(known)!r}).read_bytes()
entry = cache.Entry.of("scale", toy.ScaleConfig(), "sm_90a")
for name, damage in {CASES!r}.items():
    path.unlink()  # a file that is loaded stays what it is
    exec(damage)
    assert not path.exists() or path.read_bytes() != good
    cache._loaded.clear()
    try:
        cache.load("scale", toy.ScaleConfig(), "sm_90a")(1, 2, 3.0)
    except TypeError as error:
        print(name, path.read_bytes() == good, "Mismatched type" in str(error), sep=": ")
"""
    assert toy.run(code, tmp_path).splitlines() == [f"{name}: True: True" for name in CASES]


def test_without_a_linker_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = f"""
import os
from deltafuse.runtime import build
for name, value in (("DELTAFUSE_CACHE_DIR", {str(tmp_path / "file")!r}), ("PATH", "")):
    os.environ[name] = value
    cache._loaded.clear()
    try:
        cache.load("scale", toy.ScaleConfig(), "sm_90a")(1, 2, 3.0)
    except TypeError as error:
        print(build.find_linker() is None, "Mismatched type" in str(error))
"""
    assert toy.run(code, tmp_path / "cache").splitlines() == ["False True", "True True"]
    assert not (tmp_path / "cache").exists()


# ---- architectures -----------------------------------------------------------------------------------------------------------------
def _targets(path: Path) -> set[str]:
    """Architectures of the cubins in an object, by their ELF headers (EM_CUDA, its version in the flags)."""
    data = path.read_bytes()
    found = set()
    for match in re.finditer(b"\x7fELF", data):
        machine, flags = struct.unpack_from("<H28xI", data, match.start() + 18)
        if machine == 190:
            found.add(str(flags >> 8 & 0xFF))
    return found


def test_one_process_compiles_for_several_architectures(tmp_path: Path) -> None:
    code = """
import os
for arch in ("sm_90a", "sm_100a", "sm_80"):
    cache.load("scale", toy.ScaleConfig("bfloat16"), arch)
    print(os.environ.get("CUTE_DSL_ARCH"))
from cutlass.base_dsl.dsl import DSLSingletonMeta
print(*[x.envar.arch for x in DSLSingletonMeta._instances.values() if x.envar.prefix == "CUTE_DSL"])
"""
    printed = toy.run(code, tmp_path, CUTE_DSL_ARCH="sm_120a").splitlines()
    assert printed == ["sm_120a"] * 4, "the DSL's own setting has changed"
    targets = {path.name.split("-")[1]: _targets(path) for path in _objects(tmp_path)}
    assert targets == {"sm_90a": {"90"}, "sm_100a": {"100"}, "sm_80": {"80"}}


# ---- ahead of time -----------------------------------------------------------------------------------------------------------------
def test_ready_objects_serve_another_process(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "deltafuse.aot", "--arch", "sm_90a", "--out", str(ready), "--jobs", "2"]
    configs = ["--config", "warp.kda_combine:key_dim=64", "--config", "warp.kda_combine:key_dim=64,final=true"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "DELTAFUSE_"))}
    done = subprocess.run(
        [*command, *configs], capture_output=True, text=True, env=variables | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert f"2 objects in {ready}" in done.stdout
    assert len(_objects(ready)) == 2
    code = """
from deltafuse.kernels.config import CombineConfig
cache.load("warp.kda_combine", CombineConfig(64), "sm_90a")
cache.load("warp.kda_combine", CombineConfig(64, final=True), "sm_90a")
print("cutlass" in sys.modules)
"""
    assert toy.run(code, tmp_path / "cache", DELTAFUSE_AOT_DIR=str(ready)) == "False"
    assert not _objects(tmp_path / "cache")
