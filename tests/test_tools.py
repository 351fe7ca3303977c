"""The shell tools, with fake programs on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


class Machine:
    """A PATH whose first directory has fake programs."""

    def __init__(self, directory: Path) -> None:
        self.programs = directory / "bin"
        self.programs.mkdir()
        self.policy = directory / "policy-rc.d"
        self.log = directory / "log"

    def program(self, name: str, script: str) -> Path:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def run(self, tool: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "POLICY_RC_D": str(self.policy),
            "LOG": str(self.log),
            **environment,
        }
        return subprocess.run([TOOLS / tool, *arguments], env=variables, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestFindPython:
    def test_an_old_python_on_the_path_is_skipped(self, machine: Machine):
        old = machine.program("python3", "exit 1")
        newer = machine.program("python3.13", f'exec {sys.executable} "$@"')
        result = machine.run("find-python", PATH=f"{machine.programs}:{_basics(machine)}")
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() not in (str(old), "")
        assert newer.exists()
        checked = [result.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 11))"]
        assert subprocess.run(checked, capture_output=True, text=True).stdout.strip() == "True"

    def test_the_given_python_is_used(self, machine: Machine):
        result = machine.run("find-python", PYTHON=sys.executable)
        assert Path(result.stdout.strip()).exists()

    def test_a_given_python_that_is_too_old_is_refused_in_one_line(self, machine: Machine):
        old = machine.program("python3", "exit 1")
        result = machine.run("find-python", PYTHON=str(old))
        assert result.returncode == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert str(old) in result.stderr

    def test_without_venv_and_root_it_names_the_package_to_install(self, machine: Machine):
        machine.program("id", "echo 1000")
        bare = machine.program("python3", _WITHOUT_VENV)
        result = machine.run("find-python", PYTHON=str(bare))
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1
        assert "install python3.12-venv" in result.stderr

    def test_without_venv_root_installs_it(self, machine: Machine):
        machine.program("id", "echo 0")
        machine.program("apt-get", f'echo "$@" >>"$LOG"; touch {machine.programs}/has-venv')
        bare = machine.program("python3", _WITHOUT_VENV)
        result = machine.run("find-python", PYTHON=str(bare))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == str(bare)
        assert "python3.12-venv" in machine.log.read_text()

    def test_if_the_installation_does_not_help_it_names_the_package_to_install(self, machine: Machine):
        machine.program("id", "echo 0")
        machine.program("apt-get", "exit 100")
        bare = machine.program("python3", _WITHOUT_VENV)
        result = machine.run("find-python", PYTHON=str(bare))
        assert result.returncode == 1
        assert "install python3.12-venv" in result.stderr.splitlines()[-1]


#: Behaves like a Python 3.12 without the Debian package of the venv module.
_WITHOUT_VENV = """
case "$2" in
    *ensurepip*) test -e "${0%/*}/has-venv" ;;
    *executable*) echo "$0" ;;
    *venv\\"*) echo python3.12-venv ;;
esac
"""


def _basics(machine: Machine) -> str:
    """A directory with the programs that the search needs, without Python."""
    directory = machine.programs.parent / "basics"
    directory.mkdir()
    for name in ("sed", "head", "id"):
        (directory / name).symlink_to(next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists()))
    return str(directory)


class TestDebianInstall:
    #: Records the exit code of the policy that Debian asks before it starts a service.
    APT = 'if [ -x "$POLICY_RC_D" ]; then "$POLICY_RC_D"; echo "$* policy=$?" >>"$LOG"; fi'

    def test_no_service_starts_and_no_policy_is_left(self, machine: Machine):
        machine.program("id", "echo 0")
        machine.program("apt-get", self.APT)
        result = machine.run("debian-install", "redis-server", "nats-server")
        assert result.returncode == 0, result.stderr
        assert machine.log.read_text().splitlines()[-1].endswith("redis-server nats-server policy=101")
        assert not machine.policy.exists()

    def test_an_existing_policy_is_restored(self, machine: Machine):
        machine.program("id", "echo 0")
        machine.program("apt-get", self.APT)
        machine.policy.write_text("#!/bin/sh\nexit 0\n")
        assert machine.run("debian-install", "redis-server").returncode == 0
        assert machine.log.read_text().endswith("policy=101\n")
        assert machine.policy.read_text() == "#!/bin/sh\nexit 0\n"

    def test_a_failed_installation_is_reported_and_leaves_no_policy(self, machine: Machine):
        machine.program("id", "echo 0")
        machine.program("apt-get", "exit 100")
        result = machine.run("debian-install", "redis-server")
        assert result.returncode == 1
        assert "redis-server" in result.stderr
        assert not machine.policy.exists()

    def test_without_root_it_names_the_packages_to_install(self, machine: Machine):
        machine.program("id", "echo 1000")
        machine.program("apt-get", self.APT)
        result = machine.run("debian-install", "redis-server")
        assert result.returncode == 1
        assert "apt-get install redis-server" in result.stderr
        assert not machine.log.exists()

    def test_without_arguments_it_prints_the_usage(self, machine: Machine):
        assert machine.run("debian-install").returncode == 2


def test_every_tool_is_executable():
    assert [path.name for path in TOOLS.iterdir() if path.is_file() and not os.access(path, os.X_OK)] == []
