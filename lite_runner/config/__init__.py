"""From the command line to one checked, typed `RunConfig`. Never imports mindspore."""
