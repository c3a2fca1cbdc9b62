"""Questions to torch itself, a module per subject: how many ranks, and private names.

No other folder reaches private names of torch's modules.

Other folders import small typed functions from here. A name is found by a feature test (does the
attribute exist, does the file exist), never by comparing version numbers. If a torch lacks a
private name, its public replacement is used where there is one. Otherwise the import or the first
use raises an error. Subclasses of torch's classes elsewhere may use the private members that they
inherit.
"""
