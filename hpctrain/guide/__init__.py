"""The guides that ``hpctrain guide`` shows: a Markdown file for each topic."""
