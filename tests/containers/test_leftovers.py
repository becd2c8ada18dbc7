"""What killed sessions of tests left on the engine goes; what others have there stays."""

import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.containers.conftest import Images, checked, run
from tests.containers.leftovers import KINDS, LABEL, UPGRADED, host_token, is_dead, new_project, remove_dead


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    return process.pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_dead_with_its_process_on_this_machine(kind: str, dead_process: int):
    alive = new_project(kind)
    host, own = host_token(), alive.split("-")[3]
    dead = alive.replace(f"-{own}-", f"-{dead_process}-")
    assert (is_dead(alive), is_dead(dead)) == (False, True)
    assert not is_dead(alive.replace(f"-{own}-", "-1-")), "of another user, perhaps"
    assert not is_dead(dead.replace(host, "abcdef" if host != "abcdef" else "fedcba")), "of another machine"


@pytest.mark.parametrize("name", ["onbeat", "onbeat-test", "onbeat-test-1a2b3c", "mine-1a2b3c-99-1a2b3c", ""])
def test_other_names_are_never_taken_for_a_dead_project(name: str):
    assert not is_dead(name)


def docker(*arguments: str) -> str:
    return checked(f"docker {arguments[0]}", run(["docker", *arguments])).strip()


class Things:
    """A container with a volume, a network and a tag, labelled as those of a project are."""

    def __init__(self, images: Images, project: str) -> None:
        self.name, labelled = f"leftover-{secrets.token_hex(4)}", ["--label", f"{LABEL}={project}"]
        self.tag = f"{UPGRADED}:{project}"
        docker("volume", "create", *labelled, self.name)
        docker("network", "create", *labelled, self.name)
        docker("create", "--name", self.name, *labelled, "--volume", f"{self.name}:/data", images.redis)
        docker("tag", images.of("broker"), self.tag)

    def left(self) -> list[str]:
        places = {"container": self.name, "volume": self.name, "network": self.name, "image": self.tag}
        return [what for what, name in places.items() if run(["docker", what, "inspect", name]).returncode == 0]

    def remove(self) -> None:
        for command in (["rm", "--force"], ["volume", "rm"], ["network", "rm"]):
            run(["docker", *command, self.name])
        run(["docker", "image", "rm", self.tag])


@pytest.fixture
def things(images: Images, dead_process: int) -> Iterator[dict[str, Things]]:
    alive = new_project("onbeat-test")
    dead = alive.replace(f"-{alive.split('-')[3]}-", f"-{dead_process}-")
    made = {
        "dead": Things(images, dead),
        "alive": Things(images, alive),
        "a user's": Things(images, "theirs"),
    }
    yield made
    for each in made.values():
        each.remove()


@pytest.mark.timeout(3000)  # the first one builds the images
def test_only_what_dead_projects_left_is_removed(things: dict[str, Things], images: Images):
    everything = ["container", "volume", "network", "image"]
    assert {name: thing.left() for name, thing in things.items()} == dict.fromkeys(things, everything)
    assert things["dead"].name in remove_dead()
    left = {name: thing.left() for name, thing in things.items()}
    assert left == {"dead": [], "alive": everything, "a user's": everything}
    assert run(["docker", "image", "inspect", images.of("broker")]).returncode == 0
