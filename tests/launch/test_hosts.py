import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.hosts import check_interfaces, read_hostfile

TEXT = """\
# the nodes of this job

node-1.cluster slots=4   # with a comment
10.0.0.2 slots = 2
c:3
d
"""


def test_a_host_file_is_read_as_horovod_and_the_launchers_write_it(tmp_path):
    (tmp_path / "hosts").write_text(TEXT)
    assert read_hostfile(tmp_path / "hosts") == "node-1.cluster:4,10.0.0.2:2,c:3,d:1"


@pytest.mark.parametrize(
    "line",
    ["a slots=", "a slots=two", "a slots=2 b", "a b", "slots=2", "a:2:3", "a slots=-1", "a,b"],
)
def test_a_line_that_is_none_is_named_with_its_number(line, tmp_path):
    (tmp_path / "hosts").write_text(f"fine slots=2\n{line}\n")
    with pytest.raises(LaunchError, match=rf"host slots=N.*{line}.* line 2 of .*hosts; correct"):
        read_hostfile(tmp_path / "hosts")


def test_a_file_without_hosts_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("# nobody\n\n")
    with pytest.raises(LaunchError, match="names none"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "hosts")


def test_an_interface_must_be_on_this_host():
    check_interfaces(["lo", "10.0.0.0/24"])
    with pytest.raises(LaunchError, match=r"'eth99' is not on this one: it has .*lo"):
        check_interfaces(["lo", "eth99"])
