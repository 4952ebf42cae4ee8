"""All-reduces of MPI simulated by SimGrid, as a reference for ``hpctrain.cost.step``.

The program needs ``smpicc`` and ``smpirun`` of SimGrid (Debian: libsimgrid-dev):

    python perf/simgrid_oracle.py perf/results/simgrid.json
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  int rank, count = atoi(argv[1]) / 4;
  double end, last;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  float *mine = calloc(count, 4), *sum = calloc(count, 4);
  MPI_Allreduce(mine, sum, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  end = MPI_Wtime();
  MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) printf("%.9f\n", last);
  MPI_Finalize();
}
"""
"""All ranks enter at 0 in simulated time."""

CONSOLE = Console(width=120)
LATENCY_S, BYTES_PER_S = 0.5e-6, 12.5e9  # of each cable; a path has two, or four through the spine
SETTINGS = (
    "network/model:CM02",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/crosstraffic:0",  # no acknowledgements, which take 5 % of the reverse path
    "smpi/bw-factor:1",
    "smpi/lat-factor:1",
    "smpi/simulate-computation:no",
)
EARLY = ("smpi/async-small-thresh:100000000", "smpi/send-is-detached-thresh:100000000")
"""Of the ring: messages leave before their receives are posted. In exchanges they wait for it."""
ALGORITHMS = {"ring": "lr", "doubling": "rdb", "halving": "rab"}
"""Our names, and SimGrid's."""
FLAT = ((8, 24, 64), (8 << 10, 256 << 10, 4 << 20)), ((256, 1024, 4096), (256 << 10,))
"""Numbers of ranks and of bytes."""
LEFT_OUT = (("halving", 24), ("ring", 4096))
"""SimGrid folds ranks differently in rab; a ring of that many ranks takes hours."""
UPLINKS = (8, 4, 1)
"""Of each of the leaf switches, which have 8 nodes each."""


def cases():
    """Yield number of ranks, uplinks of a leaf (0: no tree), bytes and algorithm."""
    for ranks, sizes in FLAT:
        for size in ranks:
            for num_bytes in sizes:
                for name in ALGORITHMS:
                    if (name, size) not in LEFT_OUT:
                        yield size, 0, num_bytes, name
    for uplinks in UPLINKS:
        for num_bytes in (256 << 10, 1 << 20):
            for name in ALGORITHMS:
                yield 64, uplinks, num_bytes, name


def platform(ranks, uplinks):
    """Return a cluster with a network adapter per node, in the XML format of SimGrid."""
    tree = f'topology="FAT_TREE" topo_parameters="2;8,8;1,{uplinks};1,1"' if uplinks else ""
    return f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-{ranks - 1}" speed="1Gf" {tree}
           bw="{BYTES_PER_S:.0f}Bps" lat="{LATENCY_S:.9f}s"/>
</platform>"""


def simulated_s(folder, ranks, uplinks, num_bytes, name):
    """Return the simulated seconds until the last rank has the sum."""
    (folder / "platform.xml").write_text(platform(ranks, uplinks))
    (folder / "hosts").write_text("".join(f"n{node}\n" for node in range(ranks)))
    command = ["smpirun", "-np", str(ranks), "-platform", "platform.xml", "-hostfile", "hosts"]
    settings = (*SETTINGS, f"smpi/allreduce:{ALGORITHMS[name]}")
    settings += EARLY if name == "ring" else ()
    command += [*(f"--cfg={setting}" for setting in settings), "--log=root.thresh:error"]
    command += ["./program", str(num_bytes)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603 - names of our own
    return float(done.stdout.split()[-1])


def main():
    """Simulate all cases and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    smpicc, smpirun = shutil.which("smpicc"), shutil.which("smpirun")
    if not (smpicc and smpirun):
        parser.error("SimGrid's smpicc and smpirun are needed; install libsimgrid-dev")
    version = subprocess.run([smpirun, "-version"], capture_output=True, text=True, check=True)  # noqa: S603 - our own
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.c").write_text(PROGRAM)
        subprocess.run([smpicc, "-O1", "program.c", "-o", "program"], cwd=folder, check=True)  # noqa: S603 - our own
        for ranks, uplinks, num_bytes, algorithm in track(list(cases()), "smpirun"):
            row = {"algorithm": algorithm, "ranks": ranks, "uplinks": uplinks, "bytes": num_bytes}
            row["seconds"] = simulated_s(folder, ranks, uplinks, num_bytes, algorithm)
            rows.append(row)
            CONSOLE.print(row)
    head = {
        "command": f"python perf/simgrid_oracle.py {output}",
        "simgrid": version.stdout.split()[-1],
        "settings": SETTINGS,
        "settings of the ring": EARLY,
        "latency_s": LATENCY_S,
        "bytes_per_s": BYTES_PER_S,
    }
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    output.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
