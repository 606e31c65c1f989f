"""A vision-language model in several processes: vision tower here, language model there.

    python -m examples.multimodal --device cpu --ranks 2
    python -m examples.multimodal --device cuda --carrier ticket

``encoder.py`` is the encoder's process, ``rank.py`` a rank of the language model, ``whole.py`` the
same model in one process, which compares: every logit must be the same bit for bit.  ``model.py``
has the model, Qwen2.5-VL with a tiny random configuration, and the requests.  Features travel as a
stream, or by tickets that come with the request on another channel (``--carrier``).
"""
