"""Why tests of other programs are left out."""

NO_CLIENTS = "without lm-eval and LangChain"
