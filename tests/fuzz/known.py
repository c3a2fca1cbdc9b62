"""What the fuzzer does not provoke, as it is known to fail, with the reason."""

KNOWN: dict[str, str] = {}
