"""Triton's interpreter, faster."""

import dataclasses
import functools
import inspect


def speed_up() -> None:
    """Leave out what takes most of the interpreter's time: that it replaces the functions of
    Triton's language for every call within a kernel, not just once for every kernel; a second sum
    in int64, whose comparison needs `debug`; a table of dtypes, made for every value."""
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

    known, builder = functools.cache(interpreter._get_np_dtype), interpreter.interpreter_builder
    pointers = interpreter._get_np_dtype(tl.pointer_type(tl.int8))

    def np_dtype(kind):
        return pointers if kind.scalar.is_ptr() else known(kind.scalar)

    interpreter._get_np_dtype = np_dtype
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_all
