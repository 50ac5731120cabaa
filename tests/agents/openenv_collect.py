"""OpenEnv's own collection of episodes over its own loop of calls: SERVER EPISODES FOLDER, with OpenAI's variables."""

import os
import sys
from urllib.parse import urlsplit

from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.harness import MCPHarnessAdapter, ResourceSessionFactory, StepEnvSessionAdapter, ToolResult
from openenv.core.harness.collect import CollectRunner, RolloutSerializer, build_model_step
from openenv.core.llm_client import OpenAIClient
from openenv.core.mcp_client import MCPToolClient


def text_of(name, arguments, result, state):
    """What the policy reads of a call, with the reward of the environment."""
    seen = result.observation
    text = f"Error: {seen.error.message}" if seen.error else seen.result["data"]
    return ToolResult(data=text, done=result.done, metadata={"reward": result.reward})


class Sessions(ResourceSessionFactory):
    """Sessions of the server; a task is a seed."""

    def create(self, task, seed=None, episode_id=None):
        """Start an episode."""
        with MCPToolClient(base_url=SERVER).sync() as client:
            tools = client.list_tools()
        return StepEnvSessionAdapter(
            MCPToolClient(base_url=SERVER),
            seed=task,
            episode_id=episode_id,
            tool_specs=tools,
            action_builder=lambda name, arguments: CallToolAction(tool_name=name, arguments=arguments),
            initial_messages_builder=lambda posed, _: [{"role": "user", "content": posed.observation.prompt}],
            tool_result_builder=text_of,
        )


SERVER, episodes, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
policy = urlsplit(os.environ["OPENAI_BASE_URL"])
client = OpenAIClient(f"http://{policy.hostname}", policy.port, "policy", os.environ["OPENAI_API_KEY"])
runner = CollectRunner(
    session_factory=Sessions(),
    harness_adapter=MCPHarnessAdapter(),
    serializer=RolloutSerializer(folder),
    tasks=range(episodes),
)
print(runner.run(model_step=build_model_step(client), num_episodes=episodes))
