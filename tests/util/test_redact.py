"""No credential of an address or an argument is left, and nothing else is hidden."""

from __future__ import annotations

import pytest

from dlctl.util.redact import HIDDEN, has_credentials, redacted, redacted_arguments

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{SECRET}@mlflow:5000", f"https://{SECRET}@host/path",
        f"postgresql://me:{SECRET}@db/x", f"mysql+pymysql://me:a/{SECRET}@db/x",
        f"mysql://me:a@{SECRET}@db/x", f"http://host/?api_key={SECRET}&x=1",
        f"postgresql://db/x?password={SECRET}", f"HTTPS://me:{SECRET}@[::1]:80/",
    ],
)  # fmt: skip
def test_an_address_with_credentials_is_known_and_shown_without(address: str) -> None:
    assert has_credentials(address)
    text = f"cannot connect to {address}: refused, try ({address})"
    assert SECRET not in redacted(text)
    assert redacted(text).startswith("cannot connect to ")
    assert HIDDEN in redacted(text)


@pytest.mark.parametrize(
    "address",
    ["http://mlflow:5000", "sqlite:////home/me/a@b.db", "postgresql://me@db/x", "file:mlruns",
     "http://host/?token_count=&x=1", "me@example.org"],
)  # fmt: skip
def test_one_without_is_left_alone(address: str) -> None:
    assert not has_credentials(address)


def test_what_is_no_address_stays_as_it_is() -> None:
    text = "mean of 3 batches at 10:42, me@example.org; see http://mlflow:5000/#/runs"
    assert redacted(text) == text


def test_values_of_arguments_that_are_named_for_secrets_are_hidden() -> None:
    arguments = ["--lr", "0.1", f"--api-key={SECRET}", "--hf-token", SECRET, "--fast", "--tokens"]
    arguments += ["--password", "--next", f"http://me:{SECRET}@host"]
    shown = redacted_arguments(arguments)
    assert SECRET not in " ".join(shown)
    assert shown[:4] == ["--lr", "0.1", f"--api-key={HIDDEN}", "--hf-token"]
    assert shown[5:9] == ["--fast", "--tokens", "--password", "--next"]


def test_values_of_assignments_are_hidden_as_hydra_writes_them() -> None:
    secret = [f"hf_token={SECRET}", f"+logger.wandb.api_key={SECRET}", f"--a.password={SECRET}=="]
    shown = redacted_arguments([*secret, "model.lr=0.1", "token", "data=a=b"])
    assert SECRET not in " ".join(shown)
    assert shown[0] == f"hf_token={HIDDEN}"
    assert shown[3:] == ["model.lr=0.1", "token", "data=a=b"]
