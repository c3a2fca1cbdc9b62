"""The only folder that touches torch's private names, a module per subject.

Everything here is a small typed function or a name found by a feature test (does the attribute
exist, does the file exist), never by comparing version numbers. A private name that is missing
from some torch is replaced by the public way to the same result, so the rest of the package
imports from here and knows nothing about torch's inside.
"""
