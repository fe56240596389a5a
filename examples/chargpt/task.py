"""A GPT of characters that learns to write Python, from the standard library's own source text.

    dlctl run sync.toml          # ends with the loss and a sample
    dlctl checkpoint export -j sync.toml -o chargpt.safetensors
    python task.py chargpt.safetensors "def "

Nothing is downloaded: the text is that of the Python which runs the worker, cut to a fixed length.
The model is a decoder as in GPT-2 with 390,544 parameters, whose output layer is the embedding of
the characters.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
NUMBER_OF = {character: number for number, character in enumerate(CHARACTERS)}
CONTEXT = 64
WIDTH, HEADS, LAYERS = 88, 4, 4

TRAINED = 1_840_000
"""Characters at the beginning of the text; windows are cut out of them."""
HELD_OUT = 160_000
"""Characters that follow them, for `evaluate`."""
SAMPLES = 38_400
"""Windows of one epoch: a new one begins at about every 48th character."""
EVALUATED = 384
"""Windows of `evaluate`, spread over all that is held out."""


class TextError(Exception):
    """Too little of the standard library's source was found."""


class Block(nn.Module):
    """Causal self-attention, then two layers per position."""

    def __init__(self):
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.norm_hidden = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.out(functional.gelu(self.hidden(self.norm_hidden(x))))


class Gpt(nn.Module):
    """Numbers of characters, int64[batch, length <= CONTEXT], to scores of the next one, each
    float32[batch, length, 96]."""

    def __init__(self):
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            # As in GPT-2: what is added to the stream is smaller the more layers add to it.
            is_added = name.endswith(("attended.weight", "out.weight"))
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if is_added else 0.02)

    def forward(self, characters):
        length = characters.shape[1]
        x = self.character(characters) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.character.weight.T


class CharGpt:
    held_out = None

    def model(self):
        return Gpt()

    def dataset(self):
        return TensorDataset(windows(source_text()[:TRAINED], SAMPLES))

    def loss(self, model, batch):
        (characters,) = batch
        return loss_of(model, characters)

    def evaluate(self, model):
        # Only one worker evaluates, so the others never cut these windows.
        if self.held_out is None:
            self.held_out = windows(source_text()[TRAINED:], EVALUATED)
        device = next(model.parameters()).device
        parts = self.held_out.split(64)
        losses = [loss_of(model, part.to(device)) * len(part) for part in parts]
        return {"val_loss": torch.stack(losses).sum() / EVALUATED}

    def finish(self, model, metrics):
        """Once, when a run has finished: `dlctl run` shows what it returns."""
        return f"What it writes, at a loss of {metrics['val_loss']:.3f}:\n{sample(model)}"


def loss_of(model, characters):
    """The mean loss of each next character, in nats; characters: uint8[batch, CONTEXT + 1]."""
    characters = characters.long()
    scores = model(characters[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), characters[:, 1:].flatten())


def source_text():
    """The modules at the top of the standard library, in the order of their names, as numbers of
    characters: uint8[TRAINED + HELD_OUT].

    It is the same wherever the same version of Python is: private modules are left out, some of
    which are made when Python is built.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    numbers = bytearray()
    for path in sorted(directory.glob("[a-z]*.py")):
        text = path.read_text("utf-8", errors="replace").expandtabs(4)
        numbers += bytes(NUMBER_OF.get(character, NUMBER_OF["?"]) for character in text)
        if len(numbers) >= TRAINED + HELD_OUT:
            return torch.frombuffer(numbers, dtype=torch.uint8)[: TRAINED + HELD_OUT]
    raise TextError(
        f"{directory} has {len(numbers):,} characters of Python source, {TRAINED + HELD_OUT:,} are "
        "needed: install the whole standard library"
    )


def windows(text, count):
    """So many of them, evenly over all of the text: uint8[count, CONTEXT + 1]."""
    starts = torch.arange(count) * (len(text) - CONTEXT - 1) // (count - 1)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


@torch.no_grad()
def sample(model, prompt="\n", count=400, temperature=0.8, seed=0):
    """So many characters that the model writes after the prompt, which begins the answer.

    The model stays in the mode in which it is; here no layer asks for it.
    """
    rng, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    numbers = [NUMBER_OF.get(character, NUMBER_OF["?"]) for character in prompt or "\n"]
    for _ in range(count):
        scores = model(torch.tensor([numbers[-CONTEXT:]], device=device))[0, -1]
        chances = functional.softmax(scores.cpu() / temperature, dim=0)
        numbers.append(int(torch.multinomial(chances, 1, generator=rng)))
    return "".join(CHARACTERS[number] for number in numbers)


task = CharGpt()

if __name__ == "__main__":
    from safetensors.torch import load_file

    trained = task.model()
    trained.load_state_dict(load_file(sys.argv[1]))
    print(sample(trained, *sys.argv[2:3]))
