"""Isolated places to run a harness or a verifier in: bubblewrap, or a plain process where user namespaces are off."""

from pipeline.sandbox.base import Sandbox, SandboxError, SandboxExit, SandboxProcess, SandboxSpec, make_sandbox

__all__ = ["Sandbox", "SandboxError", "SandboxExit", "SandboxProcess", "SandboxSpec", "make_sandbox"]
