if __name__ != "dzrobot.training":
    raise ImportError(
        f"this package is dzrobot.training, not {__name__}: write `import dzrobot.training`"
    )
