"""Damages files of every format that the package reads, and reads them as a run does.

`make fuzz` runs it; `python -m fuzz --help` lists the options. A file may be refused with a
RunnerError; any other exception, a crash, a hang or a gigabyte of memory is a finding.
"""
