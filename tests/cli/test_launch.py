import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli import main
from hpctrain.cli.launch import explain
from hpctrain.core.config import Settings
from hpctrain.core.errors import HpctrainError
from hpctrain.launch import installed_horovod
from tests.processes import ended, wait_until

PYTHON = shlex.quote(sys.executable)


def hpctrain(*words):
    return ended([sys.executable, "-m", "hpctrain", *words])


def test_a_dry_run_prints_the_line_and_starts_nothing(tmp_path):
    done = hpctrain("launch", "-n", "2", "--dry-run", "touch", str(tmp_path / "started"))
    words = shlex.split(done.stdout)
    assert Path(words[0]).name == "mpirun"
    assert words[words.index("-np") + 1] == "2"
    assert words[-1] == str(tmp_path / "started")
    assert not (tmp_path / "started").exists()


def test_wrong_configuration_raises_before_any_rank_starts(tmp_path):
    (tmp_path / "a.toml").write_text("[train]\nepoch = 1\n")
    for words in (["--set", "train.epochs=2"], ["--set=train.epochs=x", "--dry-run"]):
        error = here("-n", "9", "hpctrain", "train", str(tmp_path / "a.toml"), *words).exception
        assert isinstance(error, HpctrainError)
        assert "epochs" in str(error)
    assert here("-n", "2", "--dry-run", "hpctrain", "train", "x.toml", "--init").exit_code == 0


IN_NO_FOLDER = 'mkdir "$0-$RANK" && cd "$0-$RANK" && rmdir "$0-$RANK" && exec "$@"'


def test_a_removed_working_directory_is_an_error_of_launch_and_of_each_rank(tmp_path):
    path = tmp_path / "my.toml"
    assert hpctrain("train", path, "--init").returncode == 0
    program = sys.executable, "-m", "hpctrain"
    words = "sh", "-c", IN_NO_FOLDER, tmp_path / "gone", *program
    launched = ended([*words, "launch", "-n", "2", "hpctrain", "train", path])
    trained = hpctrain("launch", "-n", "2", *words, "train", path, "--set", f"output_dir={path}-x")
    for done in (launched, trained):
        assert done.returncode == 2
        found = "hpctrain: the current directory must exist, but was removed; change to another"
        assert done.stderr.count(found) == 1


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_after_the_command_belong_to_it(dashes):
    done = hpctrain(
        "launch", "-n", "2", "--dry-run", *dashes, "python", "-c", "0", "-n", "9", "--help"
    )
    assert done.stdout.rstrip().endswith(f" {PYTHON} -c 0 -n 9 --help")
    assert " -np 2 " in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2"], "must have a command"),
        (["-n", "2", "no-such-program"], "no-such-program"),
        (["-n", "4", "--nodes", "3", "python"], "4 ranks cannot make 3"),
        (["-n", "2", "--mpirun", "/nowhere/mpirun", "python"], "/nowhere/mpirun"),
        (["-n", "2", "--node", "2", "python"], "--nodes"),
        (["python"], "-n"),
    ],
)
def test_an_impossible_launch_is_one_error_without_traceback(words, text):
    done = hpctrain("launch", *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def here(*words):
    """Run the launch command in this process; nothing is started."""
    return CliRunner().invoke(main.app, ["launch", *words])


def dry(*words):
    result = here("-np", "2", *words, "--dry-run", "python", "x.py")
    assert result.exit_code == 0, result.output
    return re.sub(r"MASTER_PORT[= ]\d+", "MASTER_PORT", result.output)


def test_options_of_horovodrun_are_ours(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1 # the other\n")
    file = str(tmp_path / "hosts")
    plain = dry("--hosts", "a:1,b:1")
    assert dry("-H", "a:1,b:1") == dry("--hostfile", file) == dry("-hostfile", file) == plain
    assert dry("--mpi", "--disable-cache", "--start-timeout", "60", "-H", "a:1,b:1") == plain
    assert "HPCTRAIN_RANKS_PER_NODE" in dry("--nodes", "2")
    extra = dry("--mpi-args=--map-by ppr:1:node --x 'two words'")
    assert " --map-by ppr:1:node --x 'two words' -np 2 " in extra


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        ("--timeline-filename t.json", f"HPCTRAIN_TIMELINE={Path.cwd()}/t.json"),
        ("--timeline-mark-cycles", "HPCTRAIN_TIMELINE_MARK_CYCLES=True"),
        ("--fusion-threshold-mb 32", "HPCTRAIN_FUSION_BYTES=33554432"),
        ("--cycle-time-ms 2.5", "HPCTRAIN_CYCLE_S=0.0025"),
        ("--no-stall-check", "HPCTRAIN_STALL_S=inf"),
        ("--stall-check-warning-time-seconds 9", "HPCTRAIN_STALL_S=9.0"),
        ("--stall-check-shutdown-time-seconds 99", "HPCTRAIN_STALL_ABORT_S=99.0"),
        ("--log-level FATAL", "HPCTRAIN_LOG_LEVEL=critical"),
        ("--reset-limit 3", "HPCTRAIN_ELASTIC_RESET_LIMIT=3"),
        ("--autotune", "HOROVOD_AUTOTUNE=1"),
        ("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME=1"),
        ("--cache-capacity 99", "HOROVOD_CACHE_CAPACITY=99"),
    ],
)
def test_options_of_horovodrun_set_the_variable_that_has_their_meaning(words, variable):
    name, _, value = variable.partition("=")
    assert re.search(rf"-(x|genv) {name}[= ]{re.escape(value)} ", dry(*words.split()))
    if name.startswith("HPCTRAIN_"):
        Settings.from_env({name: value})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-np", "5", "-H", "a:2,b:2", "python"], "5 ranks and 4 slots"),
        (["-np", "2", "--hostfile", "/nowhere/hosts", "python"], "/nowhere/hosts"),
        (["-np", "2", "--hostfile", "x", "-H", "a:2", "python"], "omit one"),
        (["-np", "2", "--network-interface", "eth99", "python"], "'eth99'"),
        (["-np", "2", "--cycle-time-ms", "-1", "python"], "--cycle-time-ms -1"),
        (["-np", "2", "--fusion-threshold-mb", "x", "python"], "--fusion-threshold-mb x"),
        (["-np", "2", "--log-level", "loud", "python"], "--log-level loud"),
        (["-np", "2", "--min-np", "1", "--max-np", "4", "python"], "--min-np"),
        (["-np", "2", "--host-discovery-script", "./x", "python"], "is fixed by -np"),
        (["-np", "2", "--blacklist-cooldown-range", "1", "2", "python"], "is fixed by -np"),
        (["-np", "2", "-p", "22", "python"], "~/.ssh/config"),
        (["-np", "2", "--config-file", "x.yaml", "python"], "guide horovod-variables"),
    ],
)
def test_unsupported_options_of_horovodrun_raise_with_a_remedy(words, text):
    error = here(*words).exception
    assert isinstance(error, HpctrainError)
    assert text in str(error)


UNUSED = {"--torus-allreduce", "--no-torus-allreduce", "--no-hierarchical-allreduce"}
UNUSED |= {"-i", "--ssh-identity-file", "--log-without-timestamp"}
"""Options that neither Horovod's tests nor its documentation use."""


@pytest.mark.requires("horovod")
def test_every_option_of_horovodrun_that_horovod_uses_is_known():
    runner = Path(sys.executable).with_name("horovodrun")
    message = subprocess.run([runner, "--help"], capture_output=True, text=True, check=True).stdout
    wanted = set(re.findall(r"^ +(?:(-\w[\w-]*)[ ,].*)?(--[\w-]+)", message, re.MULTILINE))
    launch = main.Command("launch").loaded()
    known = {name for parameter in launch.params for name in parameter.opts} | {"--help", "-h"}
    unknown = {name for names in wanted for name in names if name} - known - {"--num-proc"}
    assert unknown == UNUSED


@pytest.mark.launches
def test_ranks_get_the_options_and_each_line_names_its_rank(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CYCLE_S", "1")
    names = "HPCTRAIN_CYCLE_S", "HPCTRAIN_LOG_PER_RANK"
    code = f"import os; print('hello', *map(os.environ.get, {names}))"
    options = ["--cycle-time-ms", "5", "--network-interface", "lo", "--verbose", "--tag-output"]
    options += ["--log-per-rank"]
    done = hpctrain("launch", "-np", "2", *options, "python", "-c", code)
    assert "mpirun" in done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.partition("hello")[2] for line in lines] == [" 0.005 1"] * 2, done.stderr
    assert all(rank in line.partition("hello")[0] for rank, line in zip("01", lines, strict=True))


DDP = """\
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.full((4, 3), float(dist.get_rank()))).sum().backward()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(*(os.environ[name] for name in names), model.module.weight.grad[0, 0].item())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.launches
def test_a_script_for_torchrun_runs_unchanged_and_init_is_not_misled(tmp_path):
    (tmp_path / "both.py").write_text(
        DDP + "import hpctrain as hvd\nhvd.init()\nassert hvd.size() == 2\n"
    )
    done = hpctrain("launch", "-n", "2", "--", "python", str(tmp_path / "both.py"))
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 2.0", "1 2 1 2 2.0"], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_script_that_imports_a_missing_horovod_raises_with_the_shim_as_remedy(
    tmp_path, monkeypatch
):
    script = tmp_path / "train.py"
    script.write_text("import sys\nimport horovod.torch as hvd\n")
    monkeypatch.setattr(installed_horovod, "needed_mpi", lambda: None)
    words = ["-n", "2", "--dry-run", "python", str(script)]
    assert f"`hpctrain shim {script}` instead of `python {script}`" in here(*words).stderr
    assert here(*words[:3], "hpctrain", "shim", str(script)).stderr == ""
    script.write_text("horovod = 'import horovod'\n")
    assert here(*words).stderr == ""


@pytest.mark.launches
def test_the_exit_code_is_the_commands():
    assert hpctrain("launch", "-n", "1", "python", "-c", "raise SystemExit(7)").returncode == 7


PLAIN = """
import os, time
from pathlib import Path

Path({folder!r}, f"here-{{os.getpid()}}").touch()
time.sleep(60)
"""
POLLING = """
import sys, time
from pathlib import Path
import hpctrain as hvd

hvd.init()
stops = hvd.should_stop()
Path({folder!r}, f"here-{{hvd.rank()}}").touch()
while not stops:
    time.sleep(0.05)
    stops = hvd.should_stop()
sys.exit(hvd.STOPPED)
"""
LONG = pytest.mark.conformance


@pytest.mark.launches
@pytest.mark.parametrize(
    ("number", "polls", "options"),
    [
        (signal.SIGTERM, False, ()),
        (signal.SIGHUP, False, ("--nodes", "2")),
        (signal.SIGINT, False, ("--recover",)),
        (signal.SIGTERM, True, ()),
        pytest.param(signal.SIGHUP, True, ("--nodes", "2"), marks=LONG),
        pytest.param(signal.SIGINT, True, ("--recover",), marks=LONG),
    ],
)
def test_a_signal_ends_with_128_and_its_number_or_with_85_if_ranks_poll(
    number, polls, options, tmp_path
):
    script = tmp_path / "loop.py"
    script.write_text((POLLING if polls else PLAIN).format(folder=str(tmp_path)))
    words = ["launch", "-n", "2", *options, "--", sys.executable, str(script)]
    line = [sys.executable, "-m", "hpctrain", *words]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert wait_until(lambda: len([*tmp_path.glob("here-*")]) == 2, 60)
        process.send_signal(number)
        _, message = process.communicate(timeout=60)
    ended_by = f"hpctrain: the launch was ended by {number.name}\n"
    stopped = "hpctrain: the ranks have stopped with code 85"
    assert process.returncode == (85 if polls else 128 + number), message
    assert (message.count(ended_by), message.count(stopped)) == ((0, 1) if polls else (1, 0)), (
        message
    )
    assert polls or message == ended_by


@pytest.mark.launches
def test_launch_beyond_its_limit_reports_it():
    done = hpctrain("launch", "-n", "1", "--timeout", "0.5", "sleep", "60")
    assert done.returncode == 124
    assert "the launch was ended after 0.5 s, the limit of --timeout" in done.stderr


@pytest.mark.launches
@pytest.mark.parametrize("words", ["missing.py", "-m hpctrain no-such-command"])
def test_an_error_of_all_ranks_before_the_world_is_printed_once(tmp_path, words):
    # mpirun ends all ranks after the first one, so each waits until all have reported the error.
    wait = 'touch "$0/$$"; until [ $(ls "$0" | wc -l) = 3 ]; do sleep 0.05; done'
    program = f'"{sys.executable}" {words}; code=$?; {wait}; exit $code'
    done = hpctrain("launch", "-n", "3", "--", "sh", "-c", program, str(tmp_path))
    assert done.returncode == 2
    assert "reported this" in done.stderr
    assert done.stderr.count(words.split()[-1]) == 1, done.stderr


@pytest.mark.launches
def test_a_module_that_imports_a_missing_horovod_raises_with_the_shim_as_remedy(tmp_path):
    (tmp_path / "inner.py").write_text("import horovod.torch\n")
    code = "import sys; sys.path = [sys.argv[1]]; import inner"  # no installed packages
    done = hpctrain("launch", "-n", "2", "--", "python", "-S", "-c", code, str(tmp_path))
    assert done.stderr.count("`hpctrain shim SCRIPT` instead of `python SCRIPT`") == 1


def test_a_host_without_an_address_is_named_after_a_failure_only(capsys):
    for code, num_notes in ((0, 0), (1, 1), (85, 0), (130, 0)):
        explain(code, ["true"], "localhost:1,no-such-host.invalid:1")
        assert capsys.readouterr().err.count("but no-such-host.invalid is unknown") == num_notes
