"""Dockerfiles as Apptainer definitions: what a build would do, and what is refused by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from small_system import MORE, small_system

from pipeline.sandbox.bubblewrap import find_bwrap
from pipeline.tasks.dockerfile import CONTEXT, Unsupported, copy_context, read_dockerfile

FULL = """# syntax=docker/dockerfile:1
ARG VERSION=7
FROM base:$VERSION AS only
ENV GREETING="good day" \\
    TOOLS=/opt/tools
ENV PATH=$TOOLS/bin:$PATH
ENV OLD form of it
ARG WHO=world
WORKDIR /app
# a comment
COPY note.txt ./
COPY folder $TOOLS/
COPY *.md docs/
COPY ["note.txt", "renamed.txt"]
ADD note.txt /added
RUN echo "$GREETING ${WHO}" > said && \\
    # a comment inside
    echo $PWD >> said

RUN ["sh", "-c", "echo $PATH > /path"]
WORKDIR sub
SHELL ["/bin/bash", "-c"]
run a=(1 2); echo ${a[1]} > /array
USER root
EXPOSE 80
CMD ["server"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    place = tmp_path / "environment"
    files = {"note.txt": "note", "folder/bin/tool": "tool", "one.md": "1", "two.md": "2", "Dockerfile": FULL}
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_the_steps_make_what_the_dockerfile_says(context: Path, tmp_path: Path) -> None:
    """The steps are run for real, in a small root file system."""
    definition = read_dockerfile(context)
    assert (definition.base, definition.workdir) == ("base:7", "/app/sub")
    root = tmp_path / "root"
    small_system(root, MORE)
    (root / "usr/bin/sh").symlink_to("bash")
    post = definition.text("").partition("%post\n")[2]
    binds = ["--bind", str(root), "/", "--bind", str(context), CONTEXT, "--dev", "/dev", "--unshare-all"]
    (root / CONTEXT[1:]).mkdir()
    script = post.replace(f"rm -rf {CONTEXT}", "true")
    path = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [find_bwrap(), *binds, "--", "/bin/sh", "-c", script], env=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "app/note.txt": "note",
        "opt/tools/bin/tool": "tool",
        "app/docs/one.md": "1",
        "app/docs/two.md": "2",
        "app/renamed.txt": "note",
        "added": "note",
        "app/said": "good day world\n/app\n",
        "path": "/opt/tools/bin:/usr/bin:/image/bin\n",
        "array": "2\n",
    }
    assert {name: (root / name).read_text() for name in expected} == expected
    assert (root / "app/sub").is_dir()
    assert (
        'export PATH="/opt/tools/bin:$PATH"' in definition.text("").partition("%environment")[2].partition("%post")[0]
    )


REFUSED = [
    ("FROM a\nFROM b", "a second FROM"),
    ("FROM --platform=linux/arm64 a", "FROM --platform"),
    ("RUN true", "RUN true before FROM|RUN before FROM"),
    ("FROM a\nCOPY --from=b /x /y", "COPY --from=b"),
    ("FROM a\nCOPY --chown=1:1 note.txt /y", "COPY --chown"),
    ("FROM a\nCOPY missing /y", "COPY missing: there is no such file"),
    ("FROM a\nCOPY ../x /y", "it leads out of environment"),
    ("FROM a\nRUN --mount=type=cache,target=/x true", "RUN --mount"),
    ("FROM a\nRUN <<END\ntrue\nEND", "a here-document"),
    ("FROM a\nADD https://host/x /y", "ADD https://host/x: write RUN"),
    ("FROM a\nADD x.tar.gz /y", "ADD x.tar.gz: write COPY"),
    ("FROM a\nUSER nobody", "USER nobody"),
    ("FROM a\nVOLUME /x", "VOLUME /x"),
    ("FROM a\nENTRYPOINT [\"x\"]", "ENTRYPOINT"),
    ("FROM a\nHEALTHCHECK NONE", "HEALTHCHECK"),
    ("FROM a\nWORKDIR $UNKNOWN", r"\$UNKNOWN: only an ARG"),
    ("FROM ${A:-b}", "A:-b"),
    ("# escape=`\nFROM a", "# escape="),
    ("FROM a\nRUN true \\", "a last line that goes on"),
    ("", "no FROM"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(context: Path, text: str, reason: str) -> None:
    (context / "Dockerfile").write_text(text)
    with pytest.raises(Unsupported, match=reason):
        read_dockerfile(context)


def test_what_docker_ignores_is_not_copied(context: Path, tmp_path: Path) -> None:
    (context / ".dockerignore").write_text("# no\n*.md\nfolder/bin\n")
    copy_context(context, tmp_path / "copy")
    found = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert found == {"note.txt", "folder", "Dockerfile", ".dockerignore"}
    (context / ".dockerignore").write_text("*\n!note.txt\n")
    with pytest.raises(Unsupported, match=r"\.dockerignore: !note\.txt"):
        copy_context(context, tmp_path / "again")
