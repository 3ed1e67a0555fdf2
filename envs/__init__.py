if __name__ != "dzrobot.envs":
    raise ImportError(f"this package is dzrobot.envs, not {__name__}: write `import dzrobot.envs`")
