"""Images in the episodes of executors: where they are among the tokens, and what a process cannot claim."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from rlhf_core.chat.encoding import Tokenizer, encode_prompt, load_tokenizer, stop_token_ids
from rlhf_core.config.environments.environments import ExecutorEnvironment
from rlhf_core.contract import Input
from rlhf_core.environments.agents.executor import ExecutorHost
from rlhf_core.episodes.episode import EpisodeRules
from rlhf_core.episodes.programs import play_program
from rlhf_core.episodes.shown_images import ShownImages
from rlhf_core.errors import EpisodeError
from rlhf_core.models.vision import ImageProcessor
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.types import Completion, Prompt, SequenceImage, Trajectory
from tests.rlhf_core.environments.policies import completed
from tests.rlhf_core.pictures import picture, vision_model

pytestmark = pytest.mark.parts

RED = picture("red")
FILE = """
from PIL import Image


async def run(engine, row):
    return await globals()[row["answer"]](engine, row)


async def shows(engine, row):
    prompt = await engine.encode(row["prompt"])
    first = await engine.generate(prompt)
    blue = {"type": "image", "image": Image.new("RGB", (20, 20), "blue")}
    asked = await engine.tokenize([blue, {"type": "text", "text": "b?"}])
    second = await engine.generate(prompt + first.token_ids + asked)
    return {"reward": 1.0, "sequences": [[prompt, first, asked, second]]}


async def branches(engine, row):
    prompt = await engine.encode(row["prompt"])
    await engine.generate(prompt)
    await engine.generate(await engine.encode([{"role": "user", "content": "no image"}]))
    return 0.5


async def loses(engine, row):
    prompt = await engine.encode(row["prompt"])
    await engine.generate([*prompt])


async def moves(engine, row):
    prompt = await engine.encode(row["prompt"])
    prompt.insert(0, prompt[0])
    await engine.generate(prompt)


async def invents(engine, row):
    prompt = await engine.encode(row["prompt"])
    prompt.images.append((1, 0))
    await engine.generate(prompt)


async def shows_many(engine, row):
    prompt = await engine.encode(row["prompt"])
    await engine.generate(prompt + prompt + prompt)


async def names_a_file(engine, row):
    await engine.encode([{"role": "user", "content": "\\ufffc", "images": ["../secret"]}])


async def shows_text(engine, row):
    await engine.encode([{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return vision_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tokenizer(model: Input) -> Tokenizer:
    return load_tokenizer(model.folder)


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorHost]:
    file = tmp_path_factory.mktemp("file") / "shows.py"
    file.write_text(FILE)
    settings = {"type": "executor", "path": "shows.py", "timeout_seconds": 20}
    environments = ExecutorHost(ExecutorEnvironment.model_validate(settings), file)
    yield environments
    environments.close()


def play(
    executors: ExecutorHost,
    tokenizer: Tokenizer,
    folder: Path,
    answer: str,
    processor: ImageProcessor | None,
    requests: list[Request] | None = None,
) -> Trajectory | str:
    """The trajectory of a row with a red picture, or the error's text. The policy says `red`."""
    (row_image := folder / hashlib.sha256(RED).hexdigest()).write_bytes(RED)
    messages = [{"role": "user", "content": "\ufffca?", "images": [row_image.name]}]
    row = {"id": "row", "prompt": messages, "answer": answer}
    prompt = Prompt("row", "a?", (1,), row, images=(SequenceImage(str(row_image), 0, 1),))
    shown = None if processor is None else ShownImages(processor, folder / "shown", 2)
    sampling = SamplingParameters(1.0, 1.0, 8, stop_token_ids(tokenizer))
    rules = EpisodeRules(tokenizer, 4, 200, sampling, executors.name, images=shown)

    async def ask(request: Request) -> Completion:
        if requests is not None:
            requests.append(request)
        return completed(tokenizer, "red", request.parameters.max_tokens)

    async def episode() -> Trajectory | str:
        program = executors.new()
        try:
            return await play_program(program, prompt, rules, ask, seed=lambda number: number, environment_seed=0)
        except EpisodeError as error:
            return str(error)
        finally:
            program.close()

    return asyncio.run(episode())


def test_images_of_the_row_and_of_the_executor_are_where_their_tokens_are(
    executors: ExecutorHost, model: Input, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    processor, requests = ImageProcessor(model.folder), list[Request]()
    made = play(executors, tokenizer, tmp_path, "shows", processor, requests)
    assert isinstance(made, Trajectory), made
    (red,), (blue,) = made.prompt.images, made.feedback_images
    assert Path(red.path).read_bytes() == RED
    with Image.open(io.BytesIO(Path(blue.path).read_bytes())) as image:
        assert (image.size, image.getpixel((3, 3))) == ((20, 20), (0, 0, 255))
    tokens = made.token_ids.tolist()
    for each in (red, blue):
        assert tuple(tokens[each.start : each.start + each.length]) == processor.read(each.path).token_ids
    said = [*tokenizer("red", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert [token for token, sampled in zip(tokens, made.loss_mask, strict=True) if sampled] == said * 2
    assert [[(image.start, image.length) for image in request.images] for request in requests] == [
        [(red.start, red.length)], [(red.start, red.length), (blue.start, blue.length)],
    ]  # fmt: skip
    text = encode_prompt(tokenizer, [{"role": "user", "content": "a?"}])
    assert len(made.prompt.token_ids) == len(text) + red.length
    assert made.environment_reward == 1.0


def test_replies_that_are_not_chosen_are_joined_by_tokens_and_images(
    executors: ExecutorHost, model: Input, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = play(executors, tokenizer, tmp_path, "branches", ImageProcessor(model.folder))
    assert isinstance(made, Trajectory), made
    assert (made.prompt.images, made.feedback_images) == ((), ())
    assert [[Path(image.path).read_bytes() for image in branch.images] for branch in made.branches] == [[RED]]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("loses", "which stands for an image, and there is none: join lists of tokens by `+`"),
        ("moves", "the prompt has other tokens than those of its image at"),
        ("invents", r"it sent the policy the image [1, 0], which does not exist"),
        ("shows_many", "it has 3 images, more than rollout.max_images=2"),
        ("names_a_file", "a message has `images`: show each as a part of its `content`"),
        ("shows_text", "is not an image that can be read"),
    ],
)
def test_what_a_process_cannot_claim(
    executors: ExecutorHost, model: Input, tokenizer: Tokenizer, tmp_path: Path, answer: str, problem: str
) -> None:
    made = play(executors, tokenizer, tmp_path, answer, ImageProcessor(model.folder))
    assert isinstance(made, str), made
    assert problem in made


def test_a_policy_that_reads_text_alone_is_shown_none(
    executors: ExecutorHost, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = play(executors, tokenizer, tmp_path, "shows", None)
    assert isinstance(made, str), made
    assert "a message has an image, but the policy reads text alone" in made
