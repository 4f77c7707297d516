"""Triton's interpreter, faster."""

import functools
import inspect


def patch_language_once_a_kernel() -> None:
    """Replace the functions of Triton's language once for every kernel. The interpreter does it
    anew for every call within a kernel, which takes most of its time."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched = set()

    @functools.cache
    def languages(function):
        modules = [*filter(inspect.ismodule, function.__globals__.values())]
        return {module.__name__ for module in (tl, tl.core) if module in modules}

    def patch_once(function):
        if languages(function) <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages(function))
        return patch(function)

    def restore_all(scope):
        patched.clear()
        restore(scope)

    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_all
