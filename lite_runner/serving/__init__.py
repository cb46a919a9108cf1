"""run_mode=serve: an HTTP server of OpenAI's protocol over one scheduler."""
