"""The one exception that a call can end with.

WorkerError.code says what happened:

    from the kernel    unauthenticated invalid_request cancelled conflict checkpoint_conflict limit_reached
                       runtime_error response_too_large invalid_frame frame_timeout blob_missing
    from the client    transport_error     no reply arrived; the call may still have happened
                       truncated_response  the reply broke off; the call may still have happened
                       invalid_response    a reply arrived that is not one of the protocol
                       response_too_large  the reply was over 8 MiB
                       request_too_large   nothing was sent: the request was over 2 MiB
                       invalid_request     nothing was sent: an argument cannot be written as JSON
"""


class WorkerError(Exception):
    """A call that did not return a result. `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[str, str]]:
        # Exception would hand the one joined string to __init__, so a pool's child could not raise it in its parent.
        return type(self), (self.code, self.message)
