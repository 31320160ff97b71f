"""Every exception and warning that patchlab raises on purpose.

* PatchlabError
  + MappingError            a rule that can never work, or a key that is not there (a ValueError)
    - MappingTypeError      a replacement or a key of the wrong type (a TypeError as well)
  + ApplyError              a patch that cannot be applied to this class or model (a RuntimeError)
  + RestoreError            something patchlab changed could not be put back (a RuntimeError)
  + TargetError             a model, config, folder or id that cannot be read (a ValueError)
  + CatalogError            the installed transformers could not be read (a RuntimeError)
  + SwapError               modules that cannot be swapped in a built model (a RuntimeError)
  + CheckpointError         a checkpoint that cannot be read or judged (a ValueError)
  + RoutingError            a routing trace that does not fit the model (a ValueError)
  + ExportError             patches that cannot be written as a file; nothing is (a ValueError)
  + LaunchError             patches that cannot be brought to another process, or differ between
                            two (a RuntimeError)
  + UnknownCodeError        a finding code that there is not (a ValueError)
  + FindingsError           a plan with findings of severity "error" was asked to be carried out
                            (a ValueError)
* PatchlabWarning           the root of the warnings, so that one filter reaches all of them
  + OverMatchWarning        a rule matches more than its author is likely to mean
  + NothingReplacedWarning  a rule replaced nothing
  + FindingWarning          any other finding

In parentheses: the builtin that a class refines, by which it can be caught too. A message says what
was found, where, and what to do about it, in that order.
"""

from __future__ import annotations


class PatchlabError(Exception):
    """The root of patchlab's own exceptions."""


class MappingError(PatchlabError, ValueError):
    """A rule that can never work, a key that is taken, or a key that is not registered."""


class MappingTypeError(MappingError, TypeError):
    """A key that is no string, or a replacement that is no subclass of `torch.nn.Module`."""


class ApplyError(PatchlabError, RuntimeError):
    """A patch that cannot be applied to this class or model."""


class RestoreError(PatchlabError, RuntimeError):
    """Something that patchlab changed could not be given its original value back."""


class TargetError(PatchlabError, ValueError):
    """A model, config, folder or model id that cannot be read as the thing it was given as."""


class CatalogError(PatchlabError, RuntimeError):
    """The installed transformers could not be read."""


class SwapError(PatchlabError, RuntimeError):
    """Modules that cannot be swapped, or put back, in a model that is built; nothing is changed."""


class CheckpointError(PatchlabError, ValueError):
    """A checkpoint that is not there, of a format that is not read, or damaged."""


class RoutingError(PatchlabError, ValueError):
    """A routing trace that does not fit, or routing that cannot be recorded or imposed."""


class ExportError(PatchlabError, ValueError):
    """Patches that cannot be written as a file, or not to this path; nothing is written."""


class LaunchError(PatchlabError, RuntimeError):
    """Patches that cannot be brought to another process, or that differ between two."""


class UnknownCodeError(PatchlabError, ValueError):
    """A finding code that there is not."""


class FindingsError(PatchlabError, ValueError):
    """A plan with findings of severity "error" was asked to be carried out."""


class PatchlabWarning(UserWarning):
    """The root of patchlab's warnings."""


class OverMatchWarning(PatchlabWarning):
    """A rule matches more than its author is likely to mean."""


class NothingReplacedWarning(PatchlabWarning):
    """A rule replaced nothing."""


class FindingWarning(PatchlabWarning):
    """A finding of another kind, given once for its cause."""
