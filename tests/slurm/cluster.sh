#!/bin/bash
# A real Slurm of virtual nodes on this machine, as root: cluster.sh start ROOT NODES | stop ROOT
#
# munge, one slurmctld and a slurmd per node, each node with an address of its own on the loopback interface; no service
# of the system is touched. The nodes' names are put into /etc/hosts, since ranks meet at the first node's name, and
# taken out again. A credential lives 5 seconds instead of 120, so that a requeued job starts soon. The device files of
# the GPUs are /dev/null by other names: Slurm counts and grants them.
set -euo pipefail
PATH=$PATH:/usr/sbin
command=$1 root=$(realpath -m "$2") nodes=${3:-2} base=${PORT_BASE:-17000}
mark="# a virtual node of $root"

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

stop() {
  local file
  for file in "$root"/run/slurmctld.pid "$root"/run/slurmd.*.pid "$root"/munge/munged.pid; do
    if alive "$file"; then kill "$(cat "$file")" || true; fi
  done
  grep -v "$mark\$" /etc/hosts >"$root/hosts" || true
  cat "$root/hosts" >/etc/hosts # in a container it is a mount: it cannot be replaced
}

start() {
  local i names="n[1-$nodes]"
  mkdir -p "$root"/{run,log,spool,state,munge,dev}
  chmod 755 "$root" "$root/munge"
  (umask 077 && dd if=/dev/urandom of="$root/munge/key" bs=1024 count=1 status=none)
  for i in $(seq 0 7); do [ -e "$root/dev/gpu$i" ] || mknod "$root/dev/gpu$i" c 1 3; done
  for i in $(seq "$nodes"); do
    mkdir -p "$root/spool/n$i"
    echo "127.0.1.$i n$i $mark" >>/etc/hosts
  done
  cat >"$root/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$((base + 500))
AuthType=auth/munge
AuthInfo=socket=$root/munge/sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$root/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=20
WaitTime=5
TCPTimeout=2
MessageTimeout=5
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/slurmd.%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
NodeName=$names NodeHostname=$(hostname) NodeAddr=127.0.1.[1-$nodes] Port=[$((base + 1))-$((base + nodes))] CPUs=144 Boards=1 SocketsPerBoard=2 CoresPerSocket=72 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=$names Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=low Nodes=$names MaxTime=INFINITE State=UP PriorityTier=1
CONF
  echo "NodeName=$names Name=gpu File=$root/dev/gpu[0-7]" >"$root/gres.conf"
  export SLURM_CONF=$root/slurm.conf
  munged --key-file="$root/munge/key" --socket="$root/munge/sock" --pid-file="$root/munge/munged.pid" \
    --log-file="$root/munge/log" --seed-file="$root/munge/seed" --num-threads=4
  slurmctld -i
  for i in $(seq "$nodes"); do slurmd -N "n$i"; done
  for _ in $(seq 200); do
    [ "$(sinfo -h -p main -t idle -o %D 2>/dev/null)" != "$nodes" ] || return 0
    sleep 0.1
  done
  sinfo -N >&2
  return 1
}

case $command in start | stop) "$command" ;; *) exit 2 ;; esac
