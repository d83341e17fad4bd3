"""`minirl sample`: a few answers to one prompt, with their logprobs."""

from typing import TYPE_CHECKING, Annotated

import typer

from minirl.cli.app import Overrides, app
from minirl.errors import RecipeError

if TYPE_CHECKING:
    from minirl.tools.sample import Sampled


@app.command(
    help="""Print a few answers of a model to one prompt, with their mean logprob.

MODEL is a Hugging Face folder, a hub name, "tiny", a run directory or one of its checkpoints. Where
the model has a chat template the prompt goes through it, unless --raw. Logprobs are those of the
distribution that was sampled from (at temperature 0: the model's own).

\b
Examples:
  minirl sample runs/smoke-… "Tom has 7 apples. Tom on Monday buys 5 more. How many apples does
    Tom have?" -n 2 --tokens
  minirl sample Qwen/Qwen3-0.6B "What is 7 times 8?" --temperature 0
"""
)
def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Whose answers.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What is asked.")],
    num: Annotated[int, typer.Option("-n", "--num", help="How many answers.")] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="An answer is cut here.")] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, no template.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Each token, coloured by its logprob.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    checkpoint: Annotated[str, typer.Option(metavar="last|best", help="Of a run directory.")] = "",
    overrides: Overrides = None,
) -> None:
    from minirl.tools.evaluate import Options, as_overrides, resolve, run_of
    from minirl.tools.sample import sample as draw

    if not 1 <= num <= 1024:
        raise RecipeError("-n", num, "must be 1 to 1024", "4 is usual")
    given = {
        "tasks.kind": None if run_of(model) else "arithmetic",  # none is needed
        "seed": seed,
        "eval.temperature": temperature,
        "rollout.max_new_tokens": max_new_tokens,
    }
    values = (*(overrides or ()), *as_overrides(given))
    asked = Options(checkpoint=checkpoint, overrides=values)
    for i, answer in enumerate(draw(resolve(model, asked), prompt, num, raw)):
        head = f"--- {i + 1}: {len(answer.tokens)} tokens, {answer.stop}"
        typer.echo(f"{head}, mean logprob {answer.mean_logprob:.3f}")
        if tokens:
            show_tokens(answer)
        else:
            typer.echo(answer.text)


def show_tokens(answer: "Sampled") -> None:
    """Green was expected, yellow less, red a surprise; without colours, the numbers."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    if console.is_terminal:
        colours = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"))
        parts = [
            (piece, next((c for limit, c in colours if value >= limit), "red"))
            for piece, value in answer.tokens
        ]
        console.print(Text.assemble(*parts))
        return
    for piece, value in answer.tokens:
        typer.echo(f"{value:9.4f}  {piece!r}")
