"""What the kernels are compiled for: the PTX of an architecture, and what is made of it."""

MADE_OF = {
    "compute_75": ["compute_75", "sm_75"],  # PTX, for devices between those with machine code
    "compute_80": ["sm_80", "sm_90", "sm_100", "sm_120"],
    "compute_120": ["compute_120"],  # for newer devices, with what only they have
}
