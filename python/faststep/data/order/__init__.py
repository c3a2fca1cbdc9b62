"""Which indices an epoch has: computed ahead as torch's samplers draw them, or asked for."""
