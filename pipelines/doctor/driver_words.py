"""What NVIDIA's driver, its library and CUDA say when they fail, and the mend for it."""

_NO_DRIVER = (
    "install the NVIDIA driver on the host and blacklist nouveau; in a container ask for GPUs "
    "(--gpus all, nvidia.com/gpu)"
)
_OFF_THE_BUS = (
    "the GPU fell off the bus: dmesg | grep -i xid; drain the machine and power-cycle it; reseat "
    "the card, look at its power and heat, and have it replaced if it falls again"
)
_FABRIC = (
    "NVSwitch is not set up: systemctl restart nvidia-fabricmanager on the host, of the driver's "
    "very version"
)
# By words, in lower case; the first that is found counts.
_MENDS = (
    (
        "version mismatch",
        "the driver was updated while its kernel module is loaded: reboot, or unload every nvidia "
        "module and load it again",
    ),
    ("couldn't communicate", _NO_DRIVER),
    ("gpu is lost", _OFF_THE_BUS),
    ("unable to determine the device handle", _OFF_THE_BUS),
    ("fallen off the bus", _OFF_THE_BUS),
    (
        "no devices were found",
        "the driver is loaded and could start no GPU: dmesg | grep NVRM says why (power cables, "
        "firmware, a driver without this GPU, or the closed one where the open one is needed)",
    ),
    (
        "failed to initialize nvml: unknown error",
        "the container lost its devices, as after a systemctl daemon-reload on the host: start it "
        "anew, with --device for each /dev/nvidia* or the cgroupfs driver",
    ),
    (
        "inforom is corrupted",
        "drain the machine, nvidia-smi -r or reboot; where the warning stays, have it replaced",
    ),
    (
        "no kernel image is available",
        "this torch has no code for this GPU: torch.cuda.get_arch_list() names what it has; "
        "install one built for the GPU's CUDA architecture",
    ),
    ("system not yet initialized", _FABRIC),
    (
        "forward compatibility was attempted",
        "take cuda-compat out of LD_LIBRARY_PATH, or update the driver: only data-centre GPUs "
        "take it",
    ),
    (
        "driver version is insufficient",
        "update the driver, or install a torch of an older CUDA: see driver and CUDA",
    ),
    (
        "invalid device ordinal",
        "CUDA opens fewer GPUs than the driver lists: MIG, or CUDA_VISIBLE_DEVICES",
    ),
    ("out of memory", "see in nvidia-smi who holds the GPU's memory, or run it later"),
    ("no space left", "free some of the disk or of /dev/shm"),
)


def mend_of(words: str, otherwise: str) -> str:
    """The mend for what was said; `otherwise` where nothing here knows it."""
    said = words.lower()
    return next((mend for part, mend in _MENDS if part in said), otherwise)
