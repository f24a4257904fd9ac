"""Secrets are taken out of texts, and nothing else is."""

from __future__ import annotations

import random
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_logs import LOGS

from everstep.faults.history import LastWord
from everstep.faults.lines import clean
from everstep.faults.records import Evidence, Signal, Verdict
from everstep.faults.redact import GONE, redact, redacted

LETTERS = string.ascii_letters + string.digits
ANY = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7cF0xLrUoIeXqRt"
"""Not of any service: a value that looks like one."""

HIDDEN = (
    # what must go, and the text around it
    (f"hf_{ANY[:34]}", "huggingface_hub: using {} from the cache"),
    (f"sk-{ANY}", "openai.AuthenticationError: Incorrect API key provided: {}."),
    (f"sk-proj-{ANY}_{ANY}", "key {}"),
    (f"sk-ant-api03-{ANY}", "anthropic client with {}"),
    (f"ghp_{ANY[:36]}", "fatal: {} has no access"),
    (f"github_pat_{ANY[:22]}_{ANY}", "{}"),
    (f"glpat-{ANY[:20]}", "clone with {}"),
    (f"xoxb-123456789012-{ANY[:24]}", "slack: {}"),
    ("AKIAIOSFODNN7EXAMPLQ", "The AWS Access Key Id {} does not exist"),
    (f"AIza{ANY[:35]}", "google: {}"),
    (f"ya29.{ANY}", "oauth {}"),
    (f"eyJ{ANY[:20]}.eyJ{ANY}.{ANY[:30]}", "jwt {} is expired"),
    (f"nvapi-{ANY}", "ngc {}"),
    ("B0000000/T0000000/abcDEF123", "POST https://hooks.slack.com/services/{} 200"),
    ("hunter2", "mysql://root:{}@db.local:3306/runs failed"),
    ("p@ss:w", "curl ftp://user:{}@host/path"),
    ("p@ss/w rd", "password='{}'"),
    (ANY, "git clone https://{}@git.example.com/a.git"),
    ("Pa55w0rd", "redis://:{}@cache:6379/0"),
    ("0a1b2c3d4e", "GET https://b.s3.amazonaws.com/k?X-Amz-Date=20260311&X-Amz-Signature={}&x=1"),
    ("AKIAABCDEFGHIJKLMNOP%2F20260311", "?X-Amz-Credential={}&X-Amz-Expires=60"),
    ("svc@p.iam.gserviceaccount.com", "https://storage.googleapis.com/b/o?GoogleAccessId={}&x=1"),
    ("Zm9v%2BYmFy%3D", "https://a.blob.core.windows.net/c?sv=2024-01-01&sp=r&sig={}"),
    ("abc/def+ghi==", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};x"),
    (f"Bearer {ANY}"[7:], "> Authorization: Bearer {}"),
    ("dXNlcjpwYXNz", "Authorization: Basic {}"),
    (ANY, "{{'Authorization': 'Bearer {}', 'Accept': '*/*'}}"),
    (ANY, "headers: x-api-key: {}"),
    ("sid=abc123def", "Set-Cookie: {}; Path=/"),
    (ANY, "HF_TOKEN={}"),
    (ANY, "export WANDB_API_KEY='{}'"),
    ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AWS_SECRET_ACCESS_KEY={}"),
    (ANY, "environment: MY_SERVICE_TOKEN={} PATH=/usr/bin"),
    ("correct horse", '{{"password": "{}", "user": "me"}}'),
    ("hunter2", "password: {}"),
    ("hunter2", "db_password={} host=db"),
    ("hunter2", "Server=db;Uid=me;Pwd={};"),
    ("hunter2", "DB_PWD={}"),
    ("12345678", "password={}"),
    ("12345678901234", "auth_token: {}"),
    (ANY, '"client_secret": "{}"'),
    (ANY, "api_key => '{}'"),
    (ANY, "access_token={}&expires_in=3600"),
    (ANY, 'api_key = "{}"'),
    (ANY, "train.py --hub-token {} --steps 5"),
    ("hunter2", "tool --db-password {} -v"),
    (ANY, "env TOKEN={} train.py"),
    (ANY, "('secret_key', '{}')"),
    ("hunter2", "PGPASSWORD={} psql"),
    ("hunter2", "MYSQLPASSWD={}"),
    ("hunter2", "export MYPWD={}"),
    ("hunter2", "DB_PASSWORD_RO='{}'"),
    ("s3cr3t", "DB_PASS={} host"),
    ("wJalr/XUtn/FEMI", "s3://AKIAIOSFODNN7EXAMPLQ:{}@bucket/key"),
    ("pa/ss", "git clone https://user:{}@host/x"),
    ("pa/s@s", "git clone https://user:{}@host/x@1"),
    (ANY[:32], "os.environ['WANDB_API_KEY']='{}'"),
    (ANY[:32], "    os.environ[\"MODEL_SIGNING_KEY\"] = '{}'"),
    ("hunter2", "os.environ['PGPASSWORD'] = '{}'"),
    ("aB3dE6gH9j", "login(token={})"),
    ("aB3dE6gH9j", "login(token='{}', add_to_git=True)"),
    ("swordfish", "login(secret='{}')"),
    ("aB3dE6gH9jK2", "token: {}"),
    ("hunter2", "curl -u user:{} https://x"),
    ("hunter2", "['curl', '--user', 'user:{}', 'https://x']"),
    ("dXNlcjpwYXNzd29yZA==", "sent: Basic {}"),
    ("dXNlcjpwYXNz", "('Authorization', 'Basic {}')"),
    ("aB3dE6gH9j", '{{"api_key":"{}", "n": 1}}'),
    ("aB3dE6gH9j", '"{{\\"api_key\\": \\"{}\\", \\"n\\": 1}}"'),
    ("hunter2", "connect(password=b'{}', port=1)"),
    ("it\\'s me", "connect(password='{}', port=1)"),
    ("hunter2 and", 'cut off: password="{}'),
    (ANY[:34], "a line\\nhf_{} as repr shows it"),
    ("hunter2", "a line\\nPASSWORD={}\\nanother"),
    (ANY[:34], "https://x/?next=%2Fa%3Dhf_{}"),
    ("hunter2", "the password is: {}"),
    (ANY[:34], "wandb: login key {}"),
    ("hunter2", "mysql -h db -p{} runs"),
    (ANY, "train.py --hub-token \\\n  {} --steps 5"),
    (ANY, "['train.py', '--hub-token', '{}', '--steps', '5']"),
)

ORDINARY = (
    "step 812 loss 2.314 tokens/s 40213 num_tokens=2048 max_tokens: 4096 tokens: 8192",
    "pad_token_id=0 bos_token='<s>' eos_token: </s> unk_token=<unk> PAD_TOKEN=<pad>",
    "tokenizer=meta-llama/Llama-3.1-8B special_tokens_map.json token=</s>",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "commit 6e2845b0c44298fc1c149afbf4c8996fb92427ae (HEAD -> main) agent: the module",
    "digest xxh3:00aabbccddeeff112233445566778899 of layers.0.attn.q_proj.weight differs",
    "/data/runs/keys/private/token/secret.txt is not there",
    'File "/opt/app/auth/token.py", line 88, in get_token',
    "    access_token = get_token(client)",
    "    self.password = password",
    "    api_key = os.environ.get('OPENAI_API_KEY')",
    "KeyError: 'OPENAI_API_KEY'",
    "password=None token=None secret_key=***",
    "PermissionError: [Errno 13] Permission denied: '/data/secret'",
    'configmap "secret" not found; secret "train-token" not found',
    "tensor([[ 0.1234, -1.0e-05], [nan, 3.4]], device='cuda:0', dtype=torch.bfloat16)",
    "NVRM: Xid (PCI:0000:b1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "tcp://10.0.0.1:29500 http://node-1:8080/health?step=5&rank=3 s3://bucket/jobs/a@1/x",
    "git@github.com:a/b.git me@example.com ssh://host:22/path",
    "authorization failed for user bob: the bearer of this role may not",
    "The basic key of the loop is the token of the secret sequence",
    "ValueError: Expected key 'model.embed_tokens.weight', got sig=15 and code=1",
    "exit code=-9 signal=SIGKILL key=layers.0 --steps 5 --tokenizer llama --token-dim 512",
    "request id 5f3e9c1a-7b2d-4e8f-9a0b-1c2d3e4f5a6b took 0:00:01.5",
    "sk-learn sk-image task-1234567890123456 risk-assessment-model-2024-large-v2",
    "CUDA_VISIBLE_DEVICES=0,1,2,3 NCCL_DEBUG=INFO MASTER_ADDR=10.0.0.1 RANK=3",
    "AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/secrets/token GOOGLE_APPLICATION_CREDENTIALS=/etc/g.json",
    "PRIMARY_KEY=id SORT_KEY=name FOREIGN_KEY=user_id",
    "100%|██████████| 512/512 [00:10<00:00, 51.2it/s, loss=2.31, lr=3e-4]",
    "Checkpoint saved: /ckpt/step_000123/model-00001-of-00004.safetensors (sha1 "
    "da39a3ee5e6b4b0d3255bfef95601890afd80709)",
    "PWD=/data/user OLDPWD=/ SHELL=/bin/sh",
    "storage_key=__0_0.distcp relative_path=x user_token: 512 id_token=151643",
    "/etc/passwd: not readable; /run/secrets/db_password: not there",
    "PASS: tests/faults/test_redact.py::test_1234 SECRET: of the loop",
    "a=1;code=2;key=3;sig=15 state key: layers.0 primary key=id",
    "PASSWORD_FILE=/run/secrets/pw password_min_length=8 passwords: 3 pwd=/data OLDPWD=~/x",
    "pad_token='<|reserved_special_token_12|>' unk_token='[unused123]' sep_token: <unused99>",
    "docker run -u 1000:1000 --user 1000:1000 python -u /opt/train.py:12",
    "tcp://10.0.0.1:29500/x@1 http://node:8080/health?to=me@x http://[::1]:8080/a@b kafka://a:1,b:2/@",
    "docker pull registry:5000/torch@sha256:0123 oci://nvcr.io/nvidia/pytorch:24.01@sha256:0123",
    "Unexpected token: foo_bar12 at basic Checkpoint/Loader123 of secret: training",
    "forward pass is done: step_pass=1200 BACKWARD_PASS=off pw=0.1",
    "\x1b[31mERROR\x1b[0m loss=\x1b[1m2.31\x1b[0m token\x1b[0m id 12 \x00 [31mred",
    "a" * 64 + " " + "0123456789abcdef" * 4,
)

KEY = "\n".join((ANY * 2)[:64] for _ in range(6)) + "\nabcd=="


@pytest.mark.parametrize(("secret", "text"), HIDDEN)
def test_secrets_are_gone(secret: str, text: str) -> None:
    whole = text.format(secret)
    assert secret in whole
    found = redact(whole)
    assert secret not in found
    assert GONE in found
    assert redact(found) == found
    before, after = text.replace("{{", "{").replace("}}", "}").split("{}")
    assert found.startswith(before[:4])
    assert found.endswith(after[-4:]), "what stands around it stays"


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_lines_stay(text: str) -> None:
    assert redact(text) == text


def test_logs_of_failures_stay() -> None:
    for name, text, *_ in LOGS:
        assert redact(text) == text, name


@pytest.mark.parametrize("kind", ["RSA ", "OPENSSH ", "EC ", "ENCRYPTED ", ""])
def test_private_keys_are_gone_and_what_follows_stays(kind: str) -> None:
    block = f"-----BEGIN {kind}PRIVATE KEY-----\n{KEY}\n-----END {kind}PRIVATE KEY-----"
    found = redact(f"before\n{block}\nTraceback (most recent call last):")
    assert found == f"before\n{GONE}\nTraceback (most recent call last):"
    cut = block[:200]
    assert redact(f"{cut}\nTraceback (most recent call last):") == (
        f"{GONE}\nTraceback (most recent call last):"
    )
    assert redact(block.replace("\n", "\\n")) == GONE
    assert redact(f"[rank0]: {KEY.splitlines()[0]}") == f"[rank0]: {GONE}", "a line by itself"


def test_public_keys_and_certificates_are_no_secrets() -> None:
    text = "-----BEGIN PUBLIC KEY-----\nshort\n-----END PUBLIC KEY-----"
    assert redact(text) == text


secrets = st.sampled_from([text.format(secret) for secret, text in HIDDEN])
pieces = st.one_of(
    secrets, st.sampled_from(ORDINARY), st.text(max_size=30),
    st.sampled_from(["password", "=", ":", " ", "'", '"', "token", "://", "@", GONE, "Bearer ",
                     "\n", "&sig=", "-----BEGIN RSA PRIVATE KEY-----", "\\", "HF_TOKEN", "--token"]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, max_size=12).map("".join))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once
    assert len(once) <= len(text) * (len(GONE) + 1) + 1


@settings(max_examples=40, deadline=None)
@given(
    st.text("abcdefgh ,.\n", max_size=40), st.text(LETTERS, min_size=36, max_size=36),
    st.text("abcdefgh ,.\n", max_size=40),
)  # fmt: skip
def test_a_token_is_found_wherever_it_stands(before: str, token: str, after: str) -> None:
    assert redact(f"{before} hf_{token} {after}") == f"{before} {GONE} {after}"


@settings(max_examples=40, deadline=None)
@given(st.text("0123456789 .,:;()[]{}-+/\n\t", max_size=200))
def test_numbers_are_no_secrets(text: str) -> None:
    assert redact(text) == text


CODES = (
    "\x1b[31m", "\x1b[0m", "\x1b[1;38;5;200m", "\x1b[K", "\x1b]8;;x\x07", "\x1bM", "\x00", "\x08",
    "\x7f", "\u200b", "\u202e", "\x9b31m", "[0m", "\\x1b[31m", "\\u001b[0m", "\\033[1m",
)  # fmt: skip
coloured = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(CODES)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["", "x", "using ", "a_"]), coloured,
    st.sampled_from([f"hf_{ANY[:34]}", f"ghp_{ANY[:36]}", "AKIAIOSFODNN7EXAMPLQ", f"nvapi-{ANY}"]),
)  # fmt: skip
def test_no_colour_makes_a_token_visible(
    before: str, codes: list[tuple[int, str]], token: str
) -> None:
    text = token
    for place, code in sorted(codes, reverse=True):
        text = text[:place] + code + text[place:]
    found = redact(f"{before}{CODES[0]}{text} end")
    assert token not in "".join(clean(found))
    assert token not in "".join(clean(clean(found)[0])), "where it is cleaned again"
    assert token[8:] not in found
    assert GONE in found
    assert redact(found) == found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(pieces, st.sampled_from(CODES)), max_size=14).map("".join))
def test_coloured_text_is_redacted_once_for_all(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("name", ["password", "WANDB_API_KEY", "secret"])
def test_colours_between_a_name_and_its_value_hide_nothing(name: str) -> None:
    assert redact(f"\x1b[32m{name}\x1b[0m=\x1b[1m{ANY}\x1b[0m\n") == (
        f"\x1b[32m{name}\x1b[0m=\x1b[1m{GONE}\x1b[0m\n"
    )


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("token", [f"hf_{ANY[:34]}", f"eyJ{ANY}.eyJ{ANY * 4}.{ANY}", f"sk-{ANY}"])
def test_a_token_that_a_terminal_broke_is_found(width: int, token: str) -> None:
    for before in range(width - 25, width):
        whole = f"{'login with'.ljust(before - 1)} {token} failed\nTraceback (most recent call)"
        first, rest = whole.split("\n")
        broken = "\n".join(first[at : at + width] for at in range(0, len(first), width))
        found = redact(f"{broken}\n{rest}").split("\n")
        assert token[20:] not in "".join(found)
        assert found[-1] == rest
        assert GONE in "".join(found)
        assert not any(part and part in "".join(found) for part in re.findall(r".{12}", token))


def test_what_follows_a_full_line_stays() -> None:
    text = f"{'x' * 43}{'hf_' + ANY[:34]:>37}\nTraceback (most recent call last):"
    assert len(text.split("\n")[0]) == 80
    assert redact(text) == f"{'x' * 43}{GONE}\nTraceback (most recent call last):" or (
        redact(text).endswith("\nTraceback (most recent call last):")
    )


def test_a_hostile_text_takes_no_longer_than_it_is_long() -> None:
    for piece in (
        "a@",
        "password=",
        "-----BEGIN PRIVATE KEY-----",
        "eyJ",
        "://:",
        "?sig=",
        '"',
        "://a:b/",
        "\x1b[3",
        "\x1b]",
        "\x1b[1m",
        "hf_\n",
        "x" * 80 + "\n",
        "pwd",
        "\\",
    ):
        text = piece * (100_000 // len(piece))
        assert redact(redact(text)) == redact(text)


def test_a_long_text_hides_nothing() -> None:
    rng = random.Random(7)
    text = "".join(rng.choices(string.printable, k=200_000))
    found = redact(f"{text}\nHF_TOKEN={ANY}\n{text[:1000]}")
    assert f"\nHF_TOKEN={GONE}\n" in found
    assert ANY not in found


def test_text_that_is_no_utf8_hides_nothing() -> None:
    text = b"\xff\xfe HF_TOKEN=hf_aB3dE6gH9jK2mN5pQ8sT1vW4 \xff".decode("utf-8", "surrogateescape")
    assert redact(text) == text.replace("hf_aB3dE6gH9jK2mN5pQ8sT1vW4", GONE)


def test_records_lose_the_secrets_of_all_their_texts() -> None:
    bad, good = "HF_TOKEN=hf_aB3dE6gH9jK2mN5pQ8sT1vW4", f"HF_TOKEN={GONE}"
    signal = Signal("log", bad, rank=1, mono=2.0)
    assert redacted(signal) == Signal("log", good, rank=1, mono=2.0)
    verdict = Verdict(
        fault="USER_EXCEPTION", domain="user_code", action="stop", root_ranks=(1,), message=bad,
        evidence=(Evidence(bad, "log", why=bad),), discarded=(Evidence(bad, "kernel"),),
    )  # fmt: skip
    found = redacted(verdict)
    assert found.message == good
    assert found.evidence == (Evidence(good, "log", why=good),)
    assert found.discarded == (Evidence(good, "kernel"),)
    assert found.root_ranks == (1,)
    assert redacted(LastWord(3, bad)) == LastWord(3, good)
    assert redacted(found) is found, "nothing to do, nothing made"


def test_a_mark_of_two_bytes_behind_a_secret_is_not_cut_in_two() -> None:
    for text in (
        "secret_key=***\x80",
        "password=hunter2abc\x80é",
        "token=hf_" + "a1" * 17 + "\u200b",
    ):
        assert "hunter2abc" not in redact(text)
        assert redact(redact(text)) == redact(text)
