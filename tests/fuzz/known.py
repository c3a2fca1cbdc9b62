"""What the fuzzer does not provoke, as it is known to fail, with the reason."""

KNOWN: dict[str, str] = {
    "hostile steps": "Python code changes lists, states and gradients while they are being read",
    "negated": "of a tensor with the negative bit the sign is not seen where it is packed",
}
