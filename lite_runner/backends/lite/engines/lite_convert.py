"""MindIR -> .ms with mindspore_lite's converter: stand-alone, Python 3.7.

    lite_convert.py MINDIR STEM float32|float16

writes STEM.ms (above 2 GB STEM.msw too) into the current folder. The converter's exit status is not
reliable: lite_release.py checks its output.
"""

from __future__ import annotations

import ctypes
import signal
import sys

import mindspore_lite

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Convert the file that the command line names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    mindir, stem, weights = sys.argv[1:]
    converter = mindspore_lite.Converter()
    converter.input_format = mindspore_lite.Format.NCHW  # else 4-D inputs are transposed
    converter.save_type = mindspore_lite.ModelType.MINDIR_LITE
    converter.weight_fp16 = weights == "float16"
    try:
        converter.convert(mindspore_lite.FmkType.MINDIR, mindir, stem)
    except RuntimeError as error:
        sys.exit(str(error))  # a traceback would add nothing


if __name__ == "__main__":
    main()
