"""MindIR -> .ms with the converter inside mindspore_lite: stand-alone, Python 3.7.

    lite_convert.py MINDIR STEM float32|float16

writes STEM.ms (above 2 GB STEM.msw too) into the current folder. The converter's word for it that
this went well is worth little; converter.py looks at what it wrote.
"""

from __future__ import annotations

import ctypes
import signal
import sys

import mindspore_lite

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Convert what the command line names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody waits for it then
    mindir, stem, weights = sys.argv[1:]
    converter = mindspore_lite.Converter()
    converter.input_format = mindspore_lite.Format.NCHW  # else inputs of 4 dimensions are turned
    converter.save_type = mindspore_lite.ModelType.MINDIR_LITE
    converter.weight_fp16 = weights == "float16"
    try:
        converter.convert(mindspore_lite.FmkType.MINDIR, mindir, stem)
    except RuntimeError as error:
        sys.exit(str(error))  # a traceback would say no more


if __name__ == "__main__":
    main()
