"""What an attempt failed of is read from what its rank said: messages as people posted them, each with its thread.

The threads are on github.com; `OWNER/REPOSITORY#NUMBER` is an issue or a pull request there. Addresses and paths in the
messages are shortened.
"""

import pytest

from shardwright.pretrain import diagnosis, faults
from shardwright.pretrain.faults import HANG, Failure

VANISHED = None
"""Where a rank wrote no error of its own: what srun said of its task, or the launcher."""

MESSAGES = [
    # NVIDIA/Megatron-LM#1207
    (
        "DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.",
        "timeout",
    ),
    # pytorch/gloo#511
    (
        "RuntimeError",
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "timeout",
    ),
    # vllm-project/vllm#19670
    (
        "DistNetworkError",
        "The client socket has timed out after 600000ms while trying to connect to (172.17.0.9, 46229).",
        "timeout",
    ),
    # alibaba/Pai-Megatron-Patch#468
    ("DistStoreError", "Socket Timeout", "timeout"),
    # pytorch/pytorch#131808
    ("DistStoreError", "wait timeout after 100ms, keys: /the_key", "timeout"),
    # pytorch/pytorch#111805
    ("DistStoreError", "Timed out after 6 seconds waiting for workers. 1/2 workers joined.", "timeout"),
    # pytorch/pytorch#78514
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:30872",
        "network",
    ),
    # NVIDIA/nccl#2076
    (
        "DistBackendError",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
        "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error "
        "or a remote "
        "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.1.1.1<33759> failed : "
        "Connection reset by peer",
        "network",
    ),
    # tatsu-lab/stanford_alpaca#207
    (
        "RuntimeError",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3 ncclRemoteError: A call "
        "failed possibly due to a network error or a remote process exiting prematurely. Last error: NET/IB : Got "
        "completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129",
        "network",
    ),
    # NVIDIA/nccl#1928
    (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:3763, remote process exited or there was a network error, NCCL version "
        "2.28.8\nLast error:\nNET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 (UNDELIVERABLE).",
        "network",
    ),
    # NVIDIA/nccl#1514
    (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\nncclInternalError: Internal "
        "check failed.\nLast error:\nNet : Connection closed by remote peer user<50260>",
        "network",
    ),
    # huggingface/trl#4149
    (
        "RuntimeError",
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.",
        "hardware",
    ),
    # kohya-ss/sd-scripts#1434
    (
        "DistBackendError",
        "[Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
        "hardware",
    ),
    # MIC-DKFZ/nnUNet#1519
    ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution", "hardware"),
    # daydreamlive/scope#749
    (
        "AcceleratorError",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "hardware",
    ),
    # pytorch/pytorch#74235
    ("RuntimeError", "CUDA error: unspecified launch failure", "hardware"),
    # deepspeedai/DeepSpeed#5482, where nvidia-smi no longer found the GPU
    ("RuntimeError", "CUDA error: unknown error", "hardware"),
    # cositools/cosipy#631
    ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", "hardware"),
    # wilicc/gpu-burn#1, the kernel's log
    (VANISHED, "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.", "hardware"),
    # LSSI-ETH/plmfit#40
    (VANISHED, "slurmstepd: error: NVML: Failed to get usage(15): GPU is lost", "hardware"),
    # hiyouga/LlamaFactory#8968, a node whose fabric manager does not run
    (
        "DistBackendError",
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.25.1\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 802 'system not yet initialized'",
        "hardware",
    ),
    # pytorch/pytorch#16417
    (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which "
        "11.06 MiB is "
        "free. Including non-PyTorch memory, this process has 23.60 GiB memory in use.",
        "memory_gpu",
    ),
    # PKU-YuanGroup/Open-Sora-Plan#386
    ("DistBackendError", "NCCL Error 1: unhandled cuda error\nCuda failure 'out of memory'", "memory_gpu"),
    # ClementPinard/FlowNetPytorch#85
    ("OSError", "[Errno 12] Cannot allocate memory", "memory_host"),
    # chrisknewman/tusas#149
    (VANISHED, "Out Of Memory", "memory_host"),
    # nextflow-io/nextflow#5932
    (
        VANISHED,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM "
        "Killed.",
        "memory_host",
    ),
    # pytorch/pytorch#108861
    (
        "RuntimeError",
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out "
        "of shared memory. Please try to raise your shared memory limit.",
        "memory_host",
    ),
    # NVIDIA/nccl#290: /dev/shm is full, which no disk is
    ("DistBackendError", "NCCL WARN Call to posix_fallocate failed : No space left on device", "memory_host"),
    # pytorch/ci-infra#490
    (
        "DistBackendError",
        "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on "
        "device (28)",
        "memory_host",
    ),
    # awslabs/awsome-distributed-ai#1225
    ("OSError", "[Errno 28] No space left on device", "disk_full"),
    # hiyouga/LlamaFactory#3243
    ("OSError", "[Errno 116] Stale file handle:", "storage"),
    # THUDM/slime#326, as our own checkpoints say it
    (
        "TrainingFault",
        "the checkpoint of step 4 could not be written: rank 0: [Errno 5] Input/output error; whole ones: 2",
        "storage",
    ),
    # rhasspy/piper#311
    ("OSError", "[Errno 107] Transport endpoint is not connected", "storage"),
    # rwth-i6/returnn#1829
    (
        "RuntimeError",
        "[enforce fail at inline_container.cc:857] . PytorchStreamWriter failed writing file data/322: file write "
        "failed",
        "storage",
    ),
    # geekyutao/RN#4
    ("PermissionError", "[Errno 13] Permission denied: '/data'", "permission"),
    # matterport/Mask_RCNN#2880
    ("OSError", "[Errno 30] Read-only file system: '//logdir'", "permission"),
    # hpcaitech/Open-Sora#694
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "code"),
    # vllm-project/vllm#19890
    (
        "DistBackendError",
        "NCCL error: unhandled cuda error\nCuda failure 700 'an illegal memory access was encountered'",
        "code",
    ),
    # numpy's own words for an error of ours
    ("ValueError", "cannot reshape array of size 7 into shape (2, 4)", "code"),
    # hafs-community/HAFS#101, what srun says of a task
    (VANISHED, "Bus error", "lost_rank"),
    # what our own launcher says of a rank that was killed: by whom is not known
    (VANISHED, "killed by SIGKILL (if nobody sent it, the kernel ran out of memory: see dmesg)", "lost_rank"),
    # what a guardian says
    (
        HANG,
        "hangs: no sign for 600 s in update of step 7, at distributed_c10d.py:2696 in wait; stacks in x.log",
        "hang",
    ),
]


def failure_of(error_type: str | None, text: str) -> Failure:
    """As a rank writes it: the exit code follows from the exception."""
    if error_type in (VANISHED, HANG):
        return Failure(rank=1, host="n2", exit_code=3, error_type=error_type, error=text, traceback=None, time=1.0)
    known = {"OSError": OSError, "PermissionError": PermissionError, "RuntimeError": RuntimeError}
    known |= {"ValueError": ValueError, "TrainingFault": faults.TrainingFault}
    kind = known.get(error_type or "") or type(str(error_type), (RuntimeError,), {})
    return Failure.of(kind(text), rank=1, host="n2")


@pytest.mark.parametrize(("error_type", "text", "cause"), MESSAGES)
def test_the_cause_of_a_message_that_people_met(error_type: str | None, text: str, cause: str) -> None:
    assert diagnosis.cause_of(failure_of(error_type, text)) == cause
