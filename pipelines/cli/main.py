"""`cacheblend`: questions over documents whose KV is cached, and the care of that cache."""

from __future__ import annotations

import typer

from pipelines.cli import ask, cache, chat, demo

app = typer.Typer(
    name="cacheblend",
    help="Answer questions over documents without prefilling the same document twice.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("ask")(ask.ask)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.add_typer(cache.app, name="cache")


def run() -> None:
    """Run the command; the entry point of `cacheblend`."""
    app(prog_name="cacheblend")


if __name__ == "__main__":
    run()
