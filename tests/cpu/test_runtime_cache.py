"""The compile cache, its compiler and loader replaced by quick stand-ins: what is found, what is compiled, what is kept."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from toy import ScaleConfig

from deltafuse.kernels.config import CombineConfig, PrepareConfig, ScanConfig
from deltafuse.runtime import build, cache, launch

ARCH = "sm_90a"
COMPILE, OPEN = build.compile_kernel, build.open_object


class Compiler:
    """Stands in for the DSL and the loader: an object is `object <config>`, a function returns the object it came from."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, Any, str]] = []
        self.preloaded: list[str] = []
        self.seconds = 0.0
        self.linker = True

    def compile_kernel(self, kernel: str, config: Any, arch: str) -> Any:
        self.compiled.append((kernel, config, arch))
        time.sleep(self.seconds)
        return lambda: f"unlinked {config}"

    def link(self, compiled: Callable[[], str]) -> bytes | None:
        return compiled().replace("unlinked", "object").encode() if self.linker else None

    def open_object(self, path: Path) -> tuple[Callable[[], str], Callable[[], None]]:
        text = path.read_bytes()
        if not text.startswith(b"object"):
            raise RuntimeError(f"{path} is no object")
        what = text.partition(b"\0")[0].decode()
        return lambda: what, lambda: self.preloaded.append(what)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    toy.install()
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFUSE_AOT_DIR", raising=False)
    compiler = Compiler()
    for name in ("compile_kernel", "link", "open_object"):
        monkeypatch.setattr(build, name, getattr(compiler, name))
    fresh()
    yield compiler
    fresh()
    toy.uninstall()


def fresh() -> None:
    """Forget what is loaded, as another process would not know it."""
    for known in (cache._loaded, cache._preloads, cache._locks):
        known.clear()
    for function in (cache.sources, cache._read, cache._versions):
        function.cache_clear()


def digest(kernel: str = "scale", config: Any = None, arch: str = ARCH) -> bytes:
    return cache.Entry.of(kernel, config or ScaleConfig(), arch).digest


# ---- keys --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("kernel", "config"),
    [("warp.kda_prepare", PrepareConfig()), ("sm90.kda_scan", ScanConfig()), ("warp.kda_combine", CombineConfig())],
)
def test_every_field_changes_the_key(kernel: str, config: Any) -> None:
    digests = {digest(kernel, config)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = (not value) if isinstance(value, bool) else value + 64 if isinstance(value, int) else value + "x"
        digests.add(digest(kernel, dataclasses.replace(config, **{field.name: other})))
    assert len(digests) == 1 + len(dataclasses.fields(config))
    assert digest(kernel, config, "sm_100a") not in digests
    assert digest(kernel, config) == digest(kernel, dataclasses.replace(config))


@pytest.mark.usefixtures("compiler")
def test_kind_of_config_and_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other:
        dtype: str = "float32"
        factor: float = 2.0

    before, versions = digest(), cache._versions()
    assert digest(config=Other()) != before
    assert set(versions) == {"dsl", "tvm_ffi", "machine"}
    for name in versions:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_versions", lambda name=name: {**versions, name: "another"})
            assert digest() != before
    assert digest() == before


SOURCES = {
    "alone.py": "import math\nimport torch\n",
    "main.py": "import cutlass\nfrom .piece import f\nfrom . import group\n",
    "piece.py": "from deltafuse.kernels.group import deep\n",
    "group/__init__.py": "x = 1\n",
    "group/deep.py": "def f():\n    from ..late import g\n    return g\n",
    "late.py": "import deltafuse.kernels.config\n",
    "apart.py": "",
}


@pytest.mark.usefixtures("compiler")
def test_the_sources_of_a_kernel_change_its_key(tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sources" / name).write_text(text)
    toy.install(tmp_path / "sources")
    main, alone = digest("main"), digest("alone")
    for name in SOURCES:
        path = tmp_path / "sources" / name
        path.write_text(SOURCES[name] + "# another\n")
        fresh()
        assert (digest("main") != main) == (name not in ("alone.py", "apart.py")), name
        assert (digest("alone") != alone) == (name == "alone.py"), name
        path.write_text(SOURCES[name])
    fresh()
    assert digest("main") == main


@pytest.mark.usefixtures("compiler")
def test_a_kernel_of_the_package_depends_on_the_pieces_that_it_imports() -> None:
    found = set(cache.sources("warp.kda_combine"))
    assert build.__name__ in found
    found.remove(build.__name__)
    assert {"deltafuse.kernels.warp.kda_combine", "deltafuse.kernels.config", "deltafuse.tile.mma"} <= found
    assert all(name.startswith(("deltafuse.kernels", "deltafuse.tile")) for name in found), found
    assert "deltafuse.kernels.sm90.kda_scan" not in found


@pytest.mark.usefixtures("compiler")
def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match=r"got 'nothing'; deltafuse\.kernels has no such module"):
        cache.load("nothing", ScaleConfig(), ARCH)


# ---- memory and disk ---------------------------------------------------------------------------------------------------------------
def test_memory_then_disk(compiler: Compiler, tmp_path: Path) -> None:
    function = cache.load("scale", ScaleConfig(), ARCH)
    assert cache.load("scale", ScaleConfig(), ARCH) is function
    fresh()
    assert cache.load("scale", ScaleConfig(), ARCH)() == function() == f"object {ScaleConfig()}"
    assert compiler.compiled == [("scale", ScaleConfig(), ARCH)]
    cache.load("scale", ScaleConfig(factor=3.0), ARCH)
    cache.load("scale", ScaleConfig(), "sm_100a")
    assert len(compiler.compiled) == 3
    files = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_file())
    assert len(files) == 6
    assert all(name.startswith(("scale-sm_90a-", "scale-sm_100a-")) for name in files)
    abouts = [about for about, _ in cache.listed(tmp_path / "cache")]
    assert {about["arch"] for about in abouts} == {"sm_90a", "sm_100a"}
    assert {about["config"]["factor"] for about in abouts} == {2.0, 3.0}


def test_one_thread_compiles(compiler: Compiler) -> None:
    compiler.seconds = 0.2
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(cache.load("scale", ScaleConfig(factor=i % 2), ARCH)))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.compiled) == 2
    assert len(found) == 16
    assert len(set(found)) == 2


def test_a_failure_to_compile_is_not_remembered(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*key: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(build, "compile_kernel", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        cache.load("scale", ScaleConfig(), ARCH)
    monkeypatch.setattr(build, "compile_kernel", compiler.compile_kernel)
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"object {ScaleConfig()}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"X" + data[1:],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\x7fELF of somebody else",
    ],
)
def test_a_damaged_object_is_compiled_again(
    damage: Callable[[bytes], bytes], compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.load("scale", ScaleConfig(), ARCH)
    (path,) = (tmp_path / "cache").glob("*.so")
    good = path.read_bytes()
    path.write_bytes(damage(good))
    fresh()
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"object {ScaleConfig()}"
    assert len(compiler.compiled) == 2
    assert path.read_bytes() == good
    assert "is not used and removed: it is damaged" in caplog.text


def test_the_object_of_another_key_is_not_taken(compiler: Compiler, tmp_path: Path) -> None:
    cache.load("scale", ScaleConfig(factor=3.0), ARCH)
    (path,) = (tmp_path / "cache").glob("*.so")
    path.rename(path.with_name(cache.Entry.of("scale", ScaleConfig(), ARCH).file))
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"object {ScaleConfig()}"
    assert len(compiler.compiled) == 2


def test_an_object_that_does_not_load_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    entry = cache.Entry.of("scale", ScaleConfig(), ARCH)
    (tmp_path / "cache").mkdir()
    assert cache.store(entry, b"sealed, but nothing that loads", tmp_path / "cache") is not None
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"object {ScaleConfig()}"
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize("where", ["a file", "/proc", "/proc/deltafuse/cache"])
def test_a_folder_that_cannot_be_written(
    where: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "a file":
        (tmp_path / where).touch()
        where = str(tmp_path / where)
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", where)
    for factor in (2.0, 3.0):
        assert cache.load("scale", ScaleConfig(factor=factor), ARCH)() == f"object {ScaleConfig(factor=factor)}"
    assert len(compiler.compiled) == 2
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert all("compiled kernels are not kept" in record.getMessage() for record in said)
    assert len(said) <= 2  # once a reason; another test may have been told before


def test_without_a_linker_the_function_serves_as_it_is(compiler: Compiler, tmp_path: Path) -> None:
    compiler.linker = False
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"unlinked {ScaleConfig()}"
    assert not list((tmp_path / "cache").glob("*.so"))
    with pytest.raises(RuntimeError, match="could not be written"):
        cache.write_object("scale", ScaleConfig(), ARCH, tmp_path / "cache")


def test_set_to_nothing_there_is_no_disk(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", "")
    assert cache.cache_dir() is None
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"unlinked {ScaleConfig()}"


def test_where_objects_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", "~/kernels")
    assert cache.cache_path() == Path.home() / "kernels"
    monkeypatch.delenv("DELTAFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_path() == tmp_path / "deltafuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_path() == Path.home() / ".cache" / "deltafuse"


def test_a_missing_package_costs_no_object(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.load("scale", ScaleConfig(), ARCH)
    fresh()
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    build.runtime_library.cache_clear()
    build._runtime.cache_clear()
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(build, "open_object", OPEN)
    with pytest.raises(build.MissingError, match=r"libcute_dsl_runtime\.so of the CuTe DSL: pip install 'deltafuse"):
        cache.load("scale", ScaleConfig(), ARCH)
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    monkeypatch.setattr(build, "compile_kernel", COMPILE)
    with pytest.raises(build.MissingError, match="scale has to be compiled for sm_90a, which needs the CuTe DSL"):
        cache.load("scale", ScaleConfig(factor=3.0), ARCH)
    assert len(compiler.compiled) == 1


# ---- ready objects -----------------------------------------------------------------------------------------------------------------
def test_a_folder_of_ready_objects_comes_first(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    path = cache.write_object("scale", ScaleConfig(), ARCH, ready)
    assert cache.write_object("scale", ScaleConfig(), ARCH, ready) == path
    assert len(compiler.compiled) == 1  # there already
    before = {file.name: file.read_bytes() for file in ready.iterdir()}
    monkeypatch.setenv("DELTAFUSE_AOT_DIR", str(ready))
    assert cache.load("scale", ScaleConfig(), ARCH)() == f"object {ScaleConfig()}"
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("*.so"))
    assert len(compiler.compiled) == 1

    cache.load("scale", ScaleConfig(factor=3.0), ARCH)
    assert len(compiler.compiled) == 2
    assert "its objects are of other kernels, sources or versions" in caplog.text

    path.write_bytes(path.read_bytes()[:-1])
    damaged = path.read_bytes()
    fresh()
    cache.load("scale", ScaleConfig(), ARCH)
    assert len(compiler.compiled) == 3
    assert path.read_bytes() == damaged, "a folder that is only read was repaired"
    assert {file.name for file in ready.iterdir()} == set(before)


def test_list_and_clear(compiler: Compiler, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for factor in (1.0, 2.0):
        cache.load("scale", ScaleConfig(factor=factor), ARCH)
    for name in ("notes.txt", "other.so", "other.json"):
        (folder / name).write_text("{}")
    (folder / ".part-1").touch()
    assert [about["kernel"] for about, _ in cache.listed(folder) if about] == ["scale", "scale"]
    assert cache.clear(folder) == 2
    assert sorted(path.name for path in folder.iterdir()) == [".locks", "notes.txt", "other.json", "other.so"]
    assert cache.clear(folder) == 0
    assert cache.clear(tmp_path / "nowhere") == 0
    assert len(compiler.compiled) == 2


# ---- devices -----------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch as on a machine with GPUs; the list of devices that were made current."""
    entered: list[Any] = []

    class On:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(str(self.device))

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return entered


def test_a_load_on_a_gpu_loads_the_device_code(compiler: Compiler, gpu: list[Any]) -> None:
    cache.load("scale", ScaleConfig(), ARCH)
    cache.load("scale", ScaleConfig(), ARCH)
    assert compiler.preloaded == [f"object {ScaleConfig()}"]
    assert gpu == []


def test_prepare_does_so_on_every_device(compiler: Compiler, gpu: list[Any]) -> None:
    kernels = [("scale", ScaleConfig()), ("scale", ScaleConfig(factor=3.0)), ("scale", ScaleConfig())]
    devices = [torch.device("cuda", i) for i in (0, 1)]
    assert launch.prepare(kernels, ARCH, devices) == ("scale", "scale")
    assert gpu == ["cuda:0", "cuda:1"]
    assert len(compiler.compiled) == 2
    assert compiler.preloaded.count(f"object {ScaleConfig()}") >= 2


@pytest.mark.usefixtures("gpu")
def test_a_first_load_under_capture_says_what_to_do(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    function = cache.load("scale", ScaleConfig(), ARCH)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cache.load("scale", ScaleConfig(), ARCH) is function
    with pytest.raises(RuntimeError, match=r"while a CUDA graph is captured; call deltafuse\.warmup"):
        cache.load("scale", ScaleConfig(factor=3.0), ARCH)
    assert len(compiler.compiled) == 1


@pytest.mark.usefixtures("gpu")
def test_code_of_another_gpu_loads_without_its_device_code(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel image")

    opened = compiler.open_object
    monkeypatch.setattr(build, "open_object", lambda path: (opened(path)[0], fail))
    assert cache.load("scale", ScaleConfig(), "sm_100a")() == f"object {ScaleConfig()}"
    with pytest.raises(RuntimeError, match="no kernel image"):
        cache.preload("scale", ScaleConfig(), "sm_100a")
