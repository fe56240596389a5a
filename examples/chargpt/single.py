"""What one process makes of the same task, without dlctl: the loss to compare with.

    python single.py

AdamW, a linear warm-up, a cosine to a tenth of the rate, and gradients clipped to a norm of 1; as
many samples as the job files have, and the same initial values for the same seed.
"""

import argparse
import math

import torch
from task import SAMPLES, sample, task
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--samples", type=int, default=SAMPLES)
told = parser.parse_args()


def scale(step, steps, warm_up=0.05, final=0.1):
    """Of the rate at this step, from 0: up to 1, and down to `final`."""
    ramp = max(1, round(warm_up * steps))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def evaluate(model):
    with torch.no_grad():
        return float(task.evaluate(model)["val_loss"])


torch.manual_seed(told.seed)
model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=told.lr, betas=(0.9, 0.95), weight_decay=0.1)
steps = told.samples // told.batch_size
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale(step, steps))
loader = DataLoader(task.dataset(), told.batch_size, shuffle=True, drop_last=True)
step = 0
while step < steps:
    for batch in loader:
        loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 200 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
        if step == steps:
            break

print(sample(model, "def "))
print(f"validation loss {evaluate(model):.4f} after {steps * told.batch_size:,} samples")
