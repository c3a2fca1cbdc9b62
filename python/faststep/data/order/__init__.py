"""Which sample comes when: the draws of torch's samplers, repeated."""
