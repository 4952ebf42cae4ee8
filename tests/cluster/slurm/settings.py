"""Write the configuration files of Slurm."""

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODE_MB = 4000  # memory per node for Slurm, independent of the machine

CRED_EXPIRE_S = 5
"""Least that Slurm accepts. A requeued job waits as long and a second before it starts again."""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=login(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/s,cred_expire={cred_expire}
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
# Each node's own: pmix makes a folder named by job and step in it.
TmpFS={directory}/tmp/%n
SlurmctldPidFile={directory}/pid/slurmctld
SlurmdPidFile={directory}/pid/slurmd.%n
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/log/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# A node that was lost waits for state=resume, so that a test sees it down.
ReturnToService=1
SlurmdTimeout=5
KillWait=5
UnkillableStepTimeout=20
MinJobAge=600
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
"""

PARTITIONS = """\
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 DefMemPerCPU={mb} State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Describe a cluster."""

    directory: Path
    nodes: Sequence[str]
    port: int  # of the controller; ports of nodes follow
    cpus: int  # of each node
    gpus: int = 0

    def slurm_conf(self) -> str:
        """Return the text of ``slurm.conf``."""
        common = SLURM_CONF.format(
            directory=self.directory,
            user=pwd.getpwuid(os.getuid()).pw_name,
            port=self.port,
            cred_expire=CRED_EXPIRE_S,
        )
        parts = [
            common,
            "GresTypes=gpu\n" if self.gpus else "",
            f"NodeName=DEFAULT CPUs={self.cpus} RealMemory={NODE_MB} State=UNKNOWN",
            f" Gres=gpu:{self.gpus} Features=gpu\n" if self.gpus else "\n",
            *(
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port}\n"
                for port, node in enumerate(self.nodes, start=self.port + 1)
            ),
            PARTITIONS.format(mb=NODE_MB // self.cpus),
        ]
        return "".join(parts)

    def write(self) -> None:
        """Write all configuration files, and make the folders that the files name."""
        directory = self.directory
        for folder in ("state", "log", "munge", "pid", "home"):
            (directory / folder).mkdir()
        for folder in ("spool", "tmp"):
            for node in self.nodes:
                (directory / folder / node).mkdir(parents=True)
        (directory / "slurm.conf").write_text(self.slurm_conf())
        if self.gpus:
            (directory / "dev").mkdir()
            for number in range(self.gpus):  # slurmd needs character devices
                (directory / "dev" / f"gpu{number}").symlink_to("/dev/null")
            devices = f"Name=gpu File={directory}/dev/gpu[0-{self.gpus - 1}]\n"
            (directory / "gres.conf").write_text(devices)
