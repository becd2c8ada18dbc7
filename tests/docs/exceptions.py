"""Exceptions that the tests of the documentation do not check, with reasons. A test fails when one is not needed."""

# Programs that are not ours. Pages may use them; their options are not checked.
FOREIGN_PROGRAMS = {
    "cat": "of the system",
    "cp": "of the system",
    "echo": "of the system",
    "export": "of the shell",
    "kubectl": "of Kubernetes",
    "openssl": "makes certificates and random keys",
    "printf": "of the system",
    "python3": "of the system",
    "redis-server": "of Redis",
    "sha256sum": "of the system",
    "tensorboard": "reads the files that a trainer writes",
}

# Paths that are there only after a command of the page: (page, path).
MADE_PATHS = {
    ("docs/kubernetes.md", "deploy/kubernetes/clusters/mine"): "made by deploy/kubernetes/new_cluster.py on the page",
    ("docs/deploy.md", "deploy/docker/wheels/"): "filled by make images",
    ("docs/install.md", "onbeat-env/bin/"): "made by the page's first command; tests/e2e/test_wheel.py runs the others",
}

# Commands of `onbeat` that are parsed by the real command line, and not run.
PARSED_ONLY = {
    "onbeat up": "the stack that the tests watch is up already; tests/unit/local and tests/e2e start it",
    "onbeat down": "would end the stack that the tests watch",
    "onbeat chat": "starts an engine and reads lines; tests/unit/terminal/test_chat_command.py runs it",
    "onbeat backup": "tests/unit/local/test_data_folder.py and tests/integration/trainer/test_backup.py run it",
    "onbeat restore": "the same",
    "onbeat export": "tests/unit/terminal/test_export.py runs it; here no job has adapters, and nothing may be pushed",
    "onbeat clean": "refuses a stack that runs; tests/unit/local/test_data_folder.py runs it",
    "onbeat sweep": "trains several jobs; tests/unit/terminal/test_sweep.py runs it",
    "onbeat view": "runs until Ctrl-C; tests/unit/terminal/test_report_page.py has its parts",
    "onbeat jobs fork": "needs a checkpoint, written after 20 iterations; tests/integration/broker/test_fork.py forks",
    "onbeat keys new": "tests/integration/broker/test_security.py runs it",
    "onbeat keys list": "the same",
}

# Pages whose commands are run one after the other, by a test of their own.
STORIES = {"docs/recipes.md": "tests/docs/test_recipes.py"}

# Blocks of TOML that are no part of a job: (page, first line).
NOT_A_JOB: dict[tuple[str, str], str] = {
    ("docs/rewards.md", "# its pyproject.toml"): "test_rewards_and_engines.py installs it",
    ("docs/environments.md", "# its pyproject.toml"): "test_environments.py plays what it installs",
    ("docs/engines.md", "# its pyproject.toml"): "test_rewards_and_engines.py installs it",
    ("docs/objectives.md", "# its pyproject.toml"): "the same",
    ("docs/objectives.md", "[objective]"): "the same: it names what is installed",
}

# Figures that stand on several pages without being the same measurement.
SAME_BY_CHANCE = {
    "0.25 ms": "of a group, and of a submission without a file",
    "0.43 s": "of a page of the dashboard, and of a delta on a link",
    "1.13 times": "of overlapped work, and of an error on a GPU",
    "1.4 GB": "of NeMo-Gym on disk, and of a plan",
    "11.3 s": "of the import of vLLM in a container, and of a step of 0.1's quick start",
    "2.2 s": "of a broker's container, a step on a GPU, and a killed rollout",
    "24 GB": "sizes of a card and of a machine",
    "3.4 s": "of a killed trainer, and of weights on a link",
    "37 %": "of vLLM's time, and of answers in a warning that is an example",
    "3.8 s": "of rows of an iteration, and of a rollout that joins",
    "6.5 s": "of work without overlap, and of weights on a link",
}
