if __name__ != "dzrobot.policies":
    raise ImportError(
        f"this package is dzrobot.policies, not {__name__}: write `import dzrobot.policies`"
    )
