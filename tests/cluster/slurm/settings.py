"""The files that configure Slurm, as functions of what the cluster is."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

NODE_MB = 4000
"""Memory that Slurm lends of each node; what the machine has is not looked at."""

CRED_EXPIRE_S = 5
"""Least that Slurm accepts. A requeued job waits as long and a second before it starts again."""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={login}({login_address})
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
"""

PARTITIONS = """\
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 DefMemPerCPU={mb} State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""

NO_ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
"""

ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login_address}
AccountingStoragePort={port}
AccountingStoragePass={directory}/munge/s
"""

SLURMDBD_CONF = """\
DbdHost={login}
DbdAddr={login_address}
DbdPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/s
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StorageLoc=slurm_acct
CommitDelay=1
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/pid/slurmdbd
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a host is: what it calls itself, its address and the port of its daemon."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a cluster is."""

    directory: Path
    login: Place
    nodes: Mapping[str, Place]
    cpus: int
    gpus: int = 0
    accounting: bool = False
    user: str = field(default_factory=lambda: pwd.getpwuid(os.getuid()).pw_name)

    @property
    def accounting_port(self) -> int:
        """Port of ``slurmdbd``."""
        return self.login.port + 1

    @property
    def database_port(self) -> int:
        """Port of MariaDB."""
        return self.login.port + 2

    def slurm_conf(self) -> str:
        """Write ``slurm.conf``."""
        parts = [
            SLURM_CONF.format(**self._common(), port=self.login.port, cred_expire=CRED_EXPIRE_S),
            ACCOUNTING.format(**self._common(), port=self.accounting_port)
            if self.accounting
            else NO_ACCOUNTING,
            "GresTypes=gpu\n" if self.gpus else "",
            f"NodeName=DEFAULT CPUs={self.cpus} RealMemory={NODE_MB} State=UNKNOWN",
            f" Gres=gpu:{self.gpus}\n" if self.gpus else "\n",
            *(
                f"NodeName={node} NodeHostname={place.name} NodeAddr={place.address} "
                f"Port={place.port}\n"
                for node, place in self.nodes.items()
            ),
            PARTITIONS.format(mb=NODE_MB // self.cpus),
        ]
        return "".join(parts)

    def gres_conf(self) -> str:
        """Write ``gres.conf``: device files that stand in for GPUs."""
        return f"Name=gpu File={self.directory}/dev/gpu[0-{self.gpus - 1}]\n"

    def slurmdbd_conf(self) -> str:
        """Write ``slurmdbd.conf``, which only its owner may read."""
        return SLURMDBD_CONF.format(
            **self._common(), port=self.accounting_port, database_port=self.database_port
        )

    def _common(self) -> dict[str, str]:
        return {
            "directory": str(self.directory),
            "login": self.login.name,
            "login_address": self.login.address,
            "user": self.user,
        }


def write(settings: Settings) -> None:
    """Write all files, and make the folders that they name."""
    directory = settings.directory
    for folder in ("state", "log", "munge", "pid", "home"):
        (directory / folder).mkdir()
    for folder in ("spool", "tmp"):
        for node in settings.nodes:
            (directory / folder / node).mkdir(parents=True)
    (directory / "slurm.conf").write_text(settings.slurm_conf())
    if settings.gpus:
        (directory / "dev").mkdir()
        for number in range(settings.gpus):  # slurmd wants character devices
            (directory / "dev" / f"gpu{number}").symlink_to("/dev/null")
        (directory / "gres.conf").write_text(settings.gres_conf())
    if settings.accounting:
        secret = directory / "slurmdbd.conf"
        secret.touch(mode=0o600)
        secret.write_text(settings.slurmdbd_conf())
